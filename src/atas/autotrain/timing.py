"""Measure the time of training steps and of attacks on this machine, by short trials of both."""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from atas import attacks
from atas.attacks import StagedAttack
from atas.autotrain.plan import affordable
from atas.core.autograd import eval_mode
from atas.data import Dataset, Split
from atas.evaluation import Evaluation, evaluate
from atas.evaluation.runner import max_queries, query_cost
from atas.recipes import Recipe
from atas.threat import Linf
from atas.training.build import build
from atas.training.checkpoint import CheckpointManager
from atas.training.engine import Engine

_WARMUP_STEPS, _MAX_STEPS = 8, 200
_EPOCHS = _WARMUP_STEPS + _MAX_STEPS  # of the trial: enough even if an epoch has a single step
_HARMLESS = 1e-6  # eps of an attack that breaks no example, so that it takes all its steps
TRIED = "pgd10"
"""The attack of a trial."""
TRIED_WORK = 30
"""The cost of that attack on an image, in forward passes."""
_TRIED_IMAGES, _PROBED, _FEW = 100, 64, 4
_PROBE_PASSES = 27  # cost of the monitor for an image, in forward passes
_GRADIENT_COST = query_cost(attacks.PGD().stages[0])  # of a query of PGD, in forward passes


@dataclass(frozen=True)
class TrainingCosts:
    """Measured seconds: to prepare a training, for a step, for the monitor on an image, and to save a checkpoint with
    the state of all images."""

    preparation: float
    step: float
    probe: float
    saving: float


def measure_forward(model: nn.Module, images: Split, device: torch.device) -> float:
    """Return a rough time in seconds of a forward pass of one image, measured on a few."""
    model, x = eval_mode(copy.deepcopy(model).to(device)), (images.images[:_FEW].float() / 255).to(device)
    clock = Clock(device)
    with torch.no_grad():
        return min(_timed(lambda: model(x), clock) for _ in range(2)) / len(x)


def measure_training(
    recipe: Recipe, sample: Dataset, model: nn.Module, images: int, forward: float, seconds: float
) -> TrainingCosts:
    """Run training steps on `sample` for about `seconds`, and then the end of an epoch.

    `images` is the number of images of the real training, and `forward` the rough time of a forward pass. The model is
    not changed.
    """
    began = time.perf_counter()
    most = max(1, min(_PROBED, len(sample.train) // 5))
    probe_images = affordable(seconds, _PROBE_PASSES * forward, min(_FEW, most), most)
    recipe = recipe.with_values(
        {"training.epochs": _EPOCHS, "data.loading": "resident", "training.probe": probe_images}
    )
    parts = build(recipe, sample, copy.deepcopy(model), _ignore)
    engine, monitor = parts.engine, parts.monitor
    engine.prepare(_EPOCHS - 1)
    clock = Clock(engine.device)
    preparation = clock() - began
    _time_steps(engine, clock, _WARMUP_STEPS, seconds)
    step = _time_steps(engine, clock, _MAX_STEPS, seconds)
    probe = _timed(lambda: monitor.probe(engine.eval_model, engine.run), clock)
    if probe < seconds:  # the first is slower
        probe = _timed(lambda: monitor.probe(engine.eval_model, engine.run), clock)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = CheckpointManager(Path(folder), engine, parts.data_fingerprints)
        saving = min(_timed(lambda: checkpoints.save(Path(folder, "checkpoint"), {}), clock) for _ in range(2))
    engine.loader.close()
    return TrainingCosts(preparation, step, probe / len(monitor.images), saving * _growth(engine, images))


class Clock:
    """A clock that waits for the device to finish its work before it returns the time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self) -> float:
        """Wait for the device, and return the time."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _time_steps(engine: Engine, clock: Clock, most: int, seconds: float) -> float:
    """Return the median time of the steps that fit into `seconds`: at least one, at most `most`."""
    began, times = clock(), list[float]()
    while len(times) < most and (not times or clock() - began < seconds):
        if len(times) % len(engine.loader) == 0:
            engine.start_epoch(_EPOCHS - 1, 0)
        times.append(_timed(engine.step, clock))
    return statistics.median(times)


def _timed(function: Callable[[], object], clock: Clock) -> float:
    began = clock()
    function()
    return clock() - began


def _growth(engine: Engine, images: int) -> float:
    """Return the factor by which a checkpoint grows with the perturbations of this number of images."""
    of_images = engine.sharded_tensors()
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in engine.state_tensors().items()}
    whole, per_image = sum(sizes.values()), sum(size for name, size in sizes.items() if name in of_images)
    return 1 + per_image / whole * (images / len(engine.loader.labels) - 1)


def measure_query(model: nn.Module, images: Split, device: torch.device, forward: float, seconds: float) -> float:
    """Return the seconds of a forward pass of one image in an attack, overhead included.

    The attacks take about `seconds`; `forward` is the rough time of a forward pass.
    """
    model = eval_mode(copy.deepcopy(model).to(device))
    x = images.images[: affordable(seconds, TRIED_WORK * forward, _FEW, _TRIED_IMAGES)].float() / 255
    with torch.no_grad():
        predicted = model(x.to(device)).argmax(1).cpu()
    fastest = float("inf")
    began = time.perf_counter()
    while fastest == float("inf") or time.perf_counter() - began < seconds / 2:  # the first compiles, and fills caches
        result = evaluate(model, x, predicted, Linf(_HARMLESS), attacks=(TRIED,), details=False)
        fastest = min(fastest, seconds_of_query(result))
    return fastest


def seconds_of_query(result: Evaluation) -> float:
    """Return the seconds of a forward pass of one image, from the result of an evaluation with PGD-10."""
    return result.seconds[TRIED] / max(result.queries[TRIED], 1) / _GRADIENT_COST


def attack_work(names: Sequence[str], classes: int) -> float:
    """Return the cost of attacks on an image that withstands them, in forward passes.

    >>> round(attack_work(["fgsm", "pgd50"], classes=10))
    128
    """
    created = [attacks.create(name) for name in names]
    searches = [search for attack in created if isinstance(attack, StagedAttack) for search in attack.stages]
    single = len(created) - sum(isinstance(attack, StagedAttack) for attack in created)
    return single * _GRADIENT_COST + sum(max_queries(search, classes) * query_cost(search) for search in searches)


def _ignore(_: str) -> None:
    """Show nothing: the training itself says the same again."""
