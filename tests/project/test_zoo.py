"""Networks of every kind go through training, attacks, evaluation, a stop and export: each works, or is refused with
the right sentence."""

from __future__ import annotations

import contextlib
import importlib.util
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import zoo
from rich.console import Console
from torch import Tensor, nn

import atas
from atas.attacks import APGD, FAB, AttackEnsemble, Square
from atas.errors import AtasError
from atas.training import TrainingProgress
from atas.training.callbacks import StepInfo
from atas.training.engine import Engine

BALL = atas.Linf(0.05)
COUNT = 18
QUICK = AttackEnsemble(
    "quick", (APGD(loss="ce", iterations=2), APGD(loss="t", iterations=2), FAB(iterations=2), Square(queries=8))
)
SETTINGS: dict[str, dict[str, Any]] = {"pgd": {"steps": 2}, "trades": {"steps": 2}, "free": {"replays": 2}}
NEEDS_ONNX = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxruntime", "onnxscript")),
    reason="needs the packages of atas[onnx]",
)
RECIPE = {
    "name": "zoo",
    "data": {"name": "digits", "pad": 1, "flip": False},
    "model": {"name": "small-cnn"},
    "method": {"name": "atas", "eps": BALL.eps},
    "training": {"epochs": 2, "batch_size": 6, "probe": 6, "ema": 0.9, "loggers": ()},
    "engine": {"device": "cpu"},
}
_SLOW = ("train", "safetensors", *zoo.GRAPHS, "evaluate")
# Those that are traced in another way than the rest.
_ONNX = {"attention", "noisy", "scripted", "compiled"}
_TRACED = _ONNX | {
    *("batch-norm", "view", "lstm", "encoder", "weight-norm-by-hooks", "spectral-norm-by-hooks", "pruned", "complex"),
    *("checkpointed", "spatial-transformer", "traced", "train-returns-nothing", "extra-state", "sparse-buffer"),
}

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(weight_norm|torch.jit|torch.ao|ScriptModule|Sparse|sparse|complex).*",
    "ignore:quantized.*an autograd kernel was not registered",
    "ignore:The .grad attribute of a Tensor that is not a leaf",  # dynamo looks at it itself
)


def cases(*activities: str, only: set[str] | None = None) -> list[Any]:
    """One case for each network and activity."""
    found = []
    for name, kind in zoo.KINDS.items():
        for activity in activities:
            if only is not None and name not in only:
                continue
            marks = [pytest.mark.slow] if kind.slow or activity in _SLOW else []
            if activity == "onnx":
                marks.append(NEEDS_ONNX)
            found.append(pytest.param(kind, activity, marks=marks, id=f"{name}-{activity}"))
    return found


@contextlib.contextmanager
def expected(kind: zoo.Kind, activity: str) -> Iterator[None]:
    """Expect the refusal of an activity, one sentence of an AtasError, or nothing."""
    if activity not in kind.refuses:
        yield
        return
    with pytest.raises(AtasError, match=kind.refuses[activity]) as caught:
        yield
    assert "\n" not in str(caught.value)


def images(count: int = COUNT) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(count, *zoo.SHAPE, generator=generator), torch.arange(count) % zoo.CLASSES


@dataclass
class Look:
    """What an attack must leave as it was."""

    modes: list[bool]
    learns: list[bool]
    state: dict[str, Any]

    @staticmethod
    def at(model: Any) -> Look:
        """Look at a model; nothing to see if it is no module."""
        if not isinstance(model, nn.Module) or any(map(nn.parameter.is_lazy, model.parameters())):
            return Look([], [], {})
        state = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, Tensor)}
        modes = [getattr(module, "training", False) for module in model.modules()]
        return Look(modes, [weight.requires_grad for weight in model.parameters()], state)

    def same_flags(self, other: Look) -> bool:
        """Whether modes and flags are the same."""
        return (self.modes, self.learns) == (other.modes, other.learns)

    def same_state(self, other: Look) -> bool:
        """Whether weights and buffers are the same to the bit."""
        dense = ({name: value.to_dense() for name, value in look.state.items()} for look in (self, other))
        one, two = dense
        return one.keys() == two.keys() and all(torch.equal(value, two[name]) for name, value in one.items())


@pytest.mark.parametrize(("kind", "activity"), cases(*zoo.METHODS))
def test_a_step_of_training(kind: zoo.Kind, activity: str) -> None:
    model, (x, y) = kind.make(), images(6)
    before = Look.at(model)
    method = atas.methods.create(activity, BALL, 6, zoo.SHAPE, pad=1, **SETTINGS.get(activity, {}))
    method.start_epoch(0, epochs=1)
    # A module without weights of its own has nothing to optimise.
    weights = list(model.parameters()) if isinstance(model, nn.Module) else []
    optimizer = torch.optim.SGD(weights or [torch.zeros(1)], lr=0.1)
    with expected(kind, activity):
        step = method.step(model, optimizer, x, y, torch.arange(6))
        after = Look.at(model)
        assert step.loss.isfinite()
        assert step.logits.shape == (6, zoo.CLASSES)
        assert bool((BALL.distance(step.inputs, x) <= BALL.eps + 1e-6).all())
        assert before.same_flags(after)
        assert not before.same_state(after)


@pytest.mark.parametrize(("kind", "activity"), cases("evaluate"))
def test_an_evaluation(kind: zoo.Kind, activity: str) -> None:
    model, (x, y) = kind.make(), images(4)
    before = Look.at(model)
    with expected(kind, activity):
        result = atas.evaluate(model, x, y, BALL, attacks=("fgsm", QUICK))
        assert result.accuracy["worst"] <= result.accuracy["clean"]
        found = {warning.kind for warning in result.warnings}
        assert ("random" in found) is (kind.random and not isinstance(model, nn.Sequential))  # dropout is not, in eval
        after = Look.at(model)
        assert before.same_flags(after)
        assert before.same_state(after)


def train(kind: zoo.Kind, out: Path, *, model: Any = None, **options: Any) -> atas.Run:
    x, y = images()
    data = atas.data.from_arrays("noise", x, y, x, y, classes=list("abc"))
    live = TrainingProgress(Console(quiet=True))
    recipe = atas.recipes.from_dict(RECIPE, "zoo")
    return atas.train(recipe, out=out, model=kind.make() if model is None else model, data=data, live=live, **options)


class Stop:
    """Ask for a stop in the middle of the second epoch."""

    def due(self, info: StepInfo) -> bool:
        return (info.epoch, info.batch) == (1, 1)

    def on_step_end(self, info: StepInfo, engine: Engine) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(("kind", "activity"), cases("train"))
def test_a_training_that_is_stopped_goes_on_to_the_same_model(kind: zoo.Kind, activity: str, tmp_path: Path) -> None:
    with expected(kind, activity):
        whole = train(kind, tmp_path / "whole")
        with pytest.raises(AtasError, match="stopped after batch 1 of epoch 2"):
            train(kind, tmp_path / "stopped", observers=[Stop()])
        resumed = train(kind, tmp_path / "stopped", model=kind.make(seed=7), resume=True)
        loaded = atas.Run.load(tmp_path / "stopped", model=kind.make(seed=8))
        x, _ = images()
        with torch.no_grad():
            logits = [run.model(x) for run in (whole, resumed, loaded)]
        assert all(output.isfinite().all() for output in logits)
        if not kind.random:
            assert torch.equal(logits[0], logits[1])
            assert torch.equal(logits[0], logits[2])


EXPORTS = [*cases("safetensors"), *cases("torch-export", only=_TRACED), *cases("onnx", only=_ONNX)]


@pytest.mark.parametrize(("kind", "activity"), EXPORTS)
def test_an_export(kind: zoo.Kind, activity: str, tmp_path: Path) -> None:
    with expected(kind, activity):
        written = atas.export.write(train(kind, tmp_path), activity)
        assert all(path.stat().st_size for path in written.files)
        if activity != "safetensors" and written.difference is None:
            assert "other logits" in written.notes[-1]


@pytest.mark.parametrize("name", atas.methods.names())
def test_every_method_gives_contiguous_points(name: str) -> None:
    """`Contiguous` asserts it."""
    model, (x, y) = zoo.KINDS["contiguous"].make(), images(6)
    classes = {"classes": zoo.CLASSES} if atas.methods.takes_classes(name) else {}
    method = atas.methods.create(name, BALL, 6, zoo.SHAPE, pad=1, **classes)
    method.start_epoch(0, epochs=1)
    given = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)  # contiguous, but for PyTorch's convolutions
    method.step(model, torch.optim.SGD(model.parameters(), lr=0.1), given, y, torch.arange(6))


@pytest.mark.parametrize("ball", [BALL, atas.L2(0.2)], ids=["linf", "l2"])
def test_every_attack_gives_contiguous_points(ball: atas.threat.Threat) -> None:
    """`Contiguous` asserts it."""
    model, (x, y) = zoo.KINDS["contiguous"].make(), images(4)
    given = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    attacks: list[Callable[..., Tensor]] = [atas.attacks.create("fgsm"), atas.attacks.create("pgd2"), QUICK]
    for attack in attacks:
        attack(model, given, y, ball)
    transposed = x.permute(0, 2, 3, 1).contiguous().numpy().transpose(0, 3, 1, 2)
    atas.evaluate(model, transposed, y, ball, attacks=("fgsm", "pgd2", QUICK))
