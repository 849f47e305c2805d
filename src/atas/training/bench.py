"""Measure how fast a recipe trains on this machine, and the time of each stage of a step.

All is measured in one process: the engine that `atas train` would use, its data alone, the eager engine as reference,
and the ceiling of the device (a large matrix product in the same precision). So ratios hold even if the machine's speed
changes between runs.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from atas import data
from atas._utils import environment
from atas._utils.imports import GIVEN
from atas.distributed.world import select_device
from atas.methods import InputPerturbation
from atas.recipes import Recipe
from atas.training.build import build, build_model
from atas.training.data import load_data
from atas.training.engine import Engine
from atas.training.progress import TrainingProgress

_WARMUP_STEPS = 3
_MIN_EPOCHS = 30  # so that the schedule lasts for all rounds
_SIZES = {"cifar10": (50_000, (3, 32, 32), 10), "cifar100": (50_000, (3, 32, 32), 100)}
_FOLDER_EXAMPLES = 2048
_DATA_BOUND = 0.9  # of a step's time: if data alone takes more, steps wait for data


@dataclass(frozen=True)
class Timing:
    """Milliseconds per step: the median over rounds, the fastest and the slowest round."""

    median: float
    low: float
    high: float
    steps: int


@dataclass(frozen=True)
class BenchResult:
    """The result of a benchmark."""

    recipe: str
    batch_size: int
    engine: str
    start_up_seconds: float
    step: Timing
    data: Timing
    epoch_seconds: float
    training_seconds: float
    eager: Timing
    stages: dict[str, float]
    flop: int
    ceiling: float
    peak_memory: int
    environment: dict[str, Any]

    @property
    def limit(self) -> str:
        """The bottleneck: `data` if loading batches takes at least 90% of the time of a step, else `compute`."""
        return "data" if self.data.median >= _DATA_BOUND * self.step.median else "compute"

    @property
    def achieved(self) -> float:
        """Floating-point operations per second of convolutions and matrix products."""
        return self.flop / (self.step.median * 1e-3)

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain values."""
        return asdict(self) | {"achieved": self.achieved, "limit": self.limit}


def bench(
    recipe: Recipe,
    steps: int = 20,
    progress: TrainingProgress | None = None,
    *,
    rounds: int = 5,
    dataset: data.Dataset | None = None,
) -> BenchResult:
    """Time `steps` steps in each of several rounds, after a warm-up. Images are those of `dataset`, by default random
    ones of the recipe's size; streamed and packed data is read itself."""
    progress = progress or TrainingProgress(quiet=True)
    device = select_device(recipe.engine.device)
    images = dataset or _images(recipe)
    engine = _engine(recipe, images, progress)
    began = time.perf_counter()
    engine.prepare(recipe.training.epochs - 1)
    start_up = time.perf_counter() - began
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    step = _time(engine, steps, rounds, device)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident_bytes()
    data_timing = _time_data(engine, steps, rounds, device)
    progress.log("timing the eager engine ...")
    plain = recipe.with_values({"engine.kind": "eager"})
    reference = _engine(plain, images, progress)
    eager = step if engine.kind == reference.kind else _time(reference, max(3, steps // 10), rounds, device)
    stages = _stages(reference, device)
    flop = _flop(reference)
    for each in (engine, reference):
        each.loader.close()
    batches = len(engine.loader)
    epoch = step.median * 1e-3 * (batches - 1 + engine.loader.size(batches - 1) / engine.loader.batch_size)
    return BenchResult(
        recipe=recipe.name,
        batch_size=recipe.training.batch_size,
        engine=engine.kind,
        start_up_seconds=start_up,
        step=step,
        data=data_timing,
        epoch_seconds=epoch,
        training_seconds=epoch * recipe.training.epochs,
        eager=eager,
        stages=stages,
        flop=flop,
        ceiling=_ceiling(device, recipe.engine.precision),
        peak_memory=peak,
        environment=environment.environment_info(device),
    )


def _images(recipe: Recipe) -> data.Dataset:
    """Return random images in the number and size of the recipe's data: speed does not depend on their content. A
    packed set or a streamed folder is loaded itself, because decoding is a part of the measurement."""
    kind = data.find_source(recipe.data.name, recipe.data.root).kind
    is_folder = kind in data.FOLDERS or recipe.data.name.startswith(GIVEN)
    if (is_folder and recipe.data.loading == "streaming") or not (is_folder or kind in _SIZES):
        return load_data(recipe)
    side = recipe.data.size or data.default_size(kind)
    count, shape, classes = _SIZES.get(recipe.data.name, (_FOLDER_EXAMPLES, (3, side, side), 10))
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (count, *shape), dtype=torch.uint8, generator=generator)
    labels = torch.randint(classes, (count,), generator=generator)
    split = data.Split(pixels, labels, tuple(str(label) for label in range(classes)))
    return data.Dataset(recipe.data.name, split, split)


def _engine(recipe: Recipe, images: data.Dataset, progress: TrainingProgress) -> Engine:
    recipe = recipe.with_values({"training.epochs": max(recipe.training.epochs, _MIN_EPOCHS)})
    return build(recipe, images, build_model(recipe, images), progress.log).engine


def _time(engine: Engine, steps: int, rounds: int, device: torch.device) -> Timing:
    last = engine.recipe.training.epochs - 1  # past any warm-up of the method
    return _rounds(lambda: engine.start_epoch(last, 0), lambda batch: engine.step(), engine, steps, rounds, device)


def _time_data(engine: Engine, steps: int, rounds: int, device: torch.device) -> Timing:
    """Time the data alone: read batches, copy them to the device, crop and resize."""
    loader, epoch = engine.loader, engine.method.epoch
    order = loader.order(engine.recipe.training.epochs - 1)
    indices = order.split(loader.batch_size)

    def load(batch: int) -> None:
        loader.prefetch(batch)
        loader.take(indices[batch].to(device), epoch)

    return _rounds(lambda: loader.start_epoch(order, 0), load, engine, steps, rounds, device)


def _rounds(
    begin: Callable[[], None],
    step: Callable[[int], None],
    engine: Engine,
    steps: int,
    rounds: int,
    device: torch.device,
) -> Timing:
    steps = min(steps, max(1, len(engine.loader) - 1))
    times = []
    for _ in range(rounds + 1):
        begin()
        for batch in range(min(_WARMUP_STEPS, steps)):
            step(batch)
        begin()
        began = _now(device)
        for batch in range(steps):
            step(batch)
        times.append((_now(device) - began) / steps * 1e3)
    times = times[1:]
    return Timing(statistics.median(times), min(times), max(times), steps * rounds)


def _stages(engine: Engine, device: torch.device) -> dict[str, float]:
    """Return the share of each stage in an eager step; the device is synchronised after every stage."""
    spent: dict[str, float] = {}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began = _now(device)
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] = spent.get(name, 0.0) + _now(device) - began

        return call

    parts: list[tuple[Any, str, str]] = [
        (engine.loader, "prefetch", "data"),
        (engine.loader, "take", "data"),
        (engine, "_grad", "backward pass"),
        (engine, "apply", "optimiser"),
    ]
    if isinstance(engine.method, InputPerturbation):
        parts.append((engine.method, "_attack", "attack"))
    with _replaced(parts, timed):
        engine.start_epoch(engine.recipe.training.epochs - 1, 0)
        engine.step()
        spent.clear()
        began = _now(device)
        engine.step()
        whole = _now(device) - began
    spent["forward pass and the rest"] = whole - sum(spent.values())
    return {name: seconds / whole for name, seconds in spent.items()}


@contextmanager
def _replaced(parts: list[tuple[Any, str, str]], wrap: Callable[..., Any]) -> Iterator[None]:
    for owner, attribute, name in parts:
        setattr(owner, attribute, wrap(name, getattr(owner, attribute)))
    try:
        yield
    finally:
        for owner, attribute, _ in parts:
            delattr(owner, attribute)


def _flop(engine: Engine) -> int:
    """Count the operations of a step's convolutions and matrix products as they are dispatched."""
    engine.start_epoch(engine.recipe.training.epochs - 1, 0)
    with _Counter() as counter:
        engine.step()
    return counter.total


class _Counter(TorchDispatchMode):
    """Counts operations by torch's table. torch's own counter also tracks modules, by hooks that fail when gradients
    are taken for inputs only."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        count = flop_registry.get(function._overloadpacket)
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=result)
        return result


def _ceiling(device: torch.device, precision: str) -> float:
    """Return the operations per second of a large matrix product on random numbers: the best of six."""
    mixed = precision == "bf16" or (precision == "auto" and device.type == "cuda")
    side = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16 if mixed else torch.float32) for _ in range(2))
    best = float("inf")
    for _ in range(6):
        began = _now(device)
        torch.mm(a, b)
        best = min(best, _now(device) - began)
    return 2 * side**3 / best


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
