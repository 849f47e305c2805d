"""A finished and evaluated run on the digits, and the same without its evaluation."""

import dataclasses
import shutil

import pytest
import torch
from rich.console import Console
from torch import nn

import atas
from atas.evaluation import EvaluationWarning
from atas.training import TrainingProgress

RECIPE = {
    "name": "tiny run",
    "data": {"name": "digits", "pad": 1, "flip": False},
    "model": {"name": "small-cnn"},
    "method": {"name": "atas", "eps": 0.1},
    "training": {"epochs": 2, "batch_size": 256, "probe": 50, "loggers": ()},
    "engine": {"device": "cpu"},
}


class OwnNet(nn.Module):
    """A network that the library does not know."""

    def __init__(self, num_classes=10, channels=1):
        super().__init__()
        self.conv = nn.Conv2d(channels, 4, 3)
        self.fc = nn.Linear(4, num_classes)

    def forward(self, x):
        return self.fc(self.conv(x).relu().mean((2, 3)))


def train(out, values=None, **options):
    recipe = atas.recipes.from_dict(RECIPE, "tiny").with_values(values or {})
    return atas.train(recipe, out=out, live=TrainingProgress(Console(quiet=True)), **options)


@pytest.fixture(scope="session")
def own_net():
    return OwnNet


@pytest.fixture(scope="session")
def train_tiny():
    return train


@pytest.fixture(scope="session")
def evaluated(tmp_path_factory):
    """The folder of a run with an evaluation; not to be changed."""
    run = train(tmp_path_factory.mktemp("runs") / "evaluated")
    digits = atas.data.load("digits")
    result = atas.evaluate(
        run.model, digits.test.images[:60], digits.test.labels[:60], atas.Linf(0.1), attacks=("fgsm", "pgd10")
    )
    result.save(run.folder / "evaluation.json")
    return run.folder


@pytest.fixture
def copy_of(evaluated, tmp_path):
    """A run to do things to."""

    def make(name="copy"):
        shutil.copytree(evaluated, tmp_path / name)
        return tmp_path / name

    return make


@pytest.fixture(scope="session")
def pixels():
    """Digits of the test set, in [0, 1]."""
    return atas.data.load("digits").test.images[:8].float() / 255


@pytest.fixture(scope="session")
def logits_of(evaluated, pixels):
    """What the run's own model says of them."""
    with torch.no_grad():
        return atas.Run.load(evaluated).model(pixels)


@pytest.fixture(scope="session")
def with_autoattack():
    """A run's evaluation as if AutoAttack had broken one image in two, with a warning."""

    def change(folder):
        found = atas.Evaluation.load(folder / "evaluation.json")
        holds = found.correct["worst"].clone()
        holds[::2] = False
        correct = found.correct | {"autoattack": holds, "worst": holds}
        result = dataclasses.replace(
            found,
            correct={name: correct[name] for name in ("clean", "fgsm", "pgd10", "autoattack", "worst")},
            seconds=found.seconds | {"autoattack": 1.0},
            broken_by={},
            warnings=(EvaluationWarning("square", "the gradients are masked"),),
        )
        result.save(folder / "evaluation.json")
        return result

    return change
