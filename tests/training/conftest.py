"""Tiny runs: sixty images of 8 x 8 in three classes, a network of two convolutions, a few steps an epoch."""

import io
import json
import signal
import time

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors.torch import load_file
from torch import nn

import atas
from atas import recipes
from atas.training import TrainingProgress

TIMES = ("seconds", "examples_per_second", "checksum")  # the checksum depends on them


class TinyNet(nn.Module):
    """Two convolutions with BatchNorm, of a few hundred weights."""

    def __init__(self, num_classes=3, channels=1, width=4):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, num_classes)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


class Tied(nn.Module):
    """Two layers with the same weights."""

    def __init__(self):
        super().__init__()
        self.inward, self.outward = nn.Linear(64, 64), nn.Linear(64, 64)
        self.outward.weight = self.inward.weight
        self.last = nn.Linear(64, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.outward(torch.tanh(self.inward(x.flatten(1))))))


class RecordingProgress(TrainingProgress):
    """A live view that writes into memory and calls the test after every batch, epoch and sentence."""

    def __init__(self, on_batch=None, on_epoch=None, on_say=None, clock=time.monotonic, **console):
        self.out = io.StringIO()
        super().__init__(Console(file=self.out, **{"width": 160, **console}), clock=clock)
        self.batches = 0
        self.said = []
        self._on_batch, self._on_epoch, self._on_say = on_batch, on_epoch, on_say

    def due(self):
        self.batches += 1
        if self._on_batch is not None:
            self._on_batch(self.batches)
        return super().due()

    def end_epoch(self, done, row, epochs):
        super().end_epoch(done, row, epochs)
        if self._on_epoch is not None:
            self._on_epoch(row)

    def log(self, text, style=None):
        super().log(text, style)
        self.said.append(text)
        if self._on_say is not None:
            self._on_say(text)


@pytest.fixture(scope="session")
def observer():
    """The class of the live view that tests look through."""
    return RecordingProgress


@pytest.fixture(scope="session")
def interrupt_after():
    """A live view that sends this process SIGINT after so many batches."""

    def make(batches):
        return RecordingProgress(on_batch=lambda seen: signal.raise_signal(signal.SIGINT) if seen == batches else None)

    return make


@pytest.fixture(scope="session")
def tiny_net():
    """Make the small network; equal seeds give equal weights."""

    def make(seed=0, **options):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return TinyNet(**options)

    return make


@pytest.fixture(scope="session")
def tied_net():
    """Make the network with tied weights, always the same."""

    def make():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return Tied()

    return make


def make_split(count, seed):
    """Images of noise in which the class shows as a bright band."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    images = torch.rand(count, 1, 8, 8, generator=generator) * 0.5
    for image, label in zip(images, labels.tolist(), strict=True):
        image[:, 1 + 2 * label : 3 + 2 * label] += 0.5
    return images, labels


@pytest.fixture(scope="session")
def toy_data():
    """Sixty training images, no two alike, and thirty for testing."""
    return atas.data.from_arrays("toy", *make_split(60, seed=1), *make_split(30, seed=2))


@pytest.fixture(scope="session")
def toy_recipe():
    """Make a recipe for the toy data: `toy_recipe("free", {"training.epochs": 2})`."""

    def make(method="atas", values=None):
        own = {"atas": {"warmup_epochs": 1, "reset_every": 2, "max_step": 0.2, "clip": (0.02, 0.15)}}
        document = {
            "name": "toy",
            "data": {"name": "digits", "pad": 1, "flip": True},
            "model": {"name": "small-cnn"},
            "method": {"name": method, "eps": 0.1, **own.get(method, {})},
            "schedule": {"peak": 0.05, "milestones": (0.5, 0.8)},
            "training": {"epochs": 3, "batch_size": 16, "probe": 20, "checkpoint_every": 3600.0},
            "engine": {"device": "cpu"},
            "evaluation": {"attacks": ("fgsm",)},
        }
        return recipes.from_dict(document, "toy").with_values(values or {})

    return make


@pytest.fixture(scope="session")
def train_toy(toy_data, toy_recipe, tiny_net):
    """Train on the toy data: `train_toy(folder, "free", {"training.epochs": 2}, resume=True)`."""

    def train(out, method="atas", values=None, **options):
        options = {"data": toy_data, "model": tiny_net(), "live": RecordingProgress(), **options}
        return atas.train(toy_recipe(method, values), out=out, **options)

    return train


@pytest.fixture(scope="session")
def rows_of():
    """All rows of a run's metrics, without the times, in which no two runs agree."""

    def read(folder):
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [{key: value for key, value in json.loads(line).items() if key not in TIMES} for line in lines]

    return read


@pytest.fixture(scope="session")
def assert_same_run(rows_of):
    """Two runs agree in every bit that does not tell the time: weights, checkpoint, counters and metrics."""

    def check(folder, other):
        from atas.training import checkpoint

        weights, weights_2 = (load_file(place / "model.safetensors") for place in (folder, other))
        assert list(weights) == list(weights_2)
        for name, tensor in weights.items():
            assert torch.equal(tensor, weights_2[name]), name
        (tensors, state), (tensors_2, state_2) = (
            checkpoint.load(place / "checkpoints" / "last.safetensors") for place in (folder, other)
        )
        assert list(tensors) == list(tensors_2)
        for name, tensor in tensors.items():
            assert torch.equal(tensor, tensors_2[name]), name
        for key in ("epoch", "batch", "updates", "rollbacks", "monitor"):
            assert state[key] == state_2[key], key
        assert rows_of(folder) == rows_of(other)

    return check


@pytest.fixture(scope="session")
def checkpoint_files():
    """The files in a run's checkpoint folder, temporary ones included."""

    def names(folder):
        return sorted(path.name for path in (folder / "checkpoints").iterdir())

    return names
