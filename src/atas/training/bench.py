"""How fast a recipe trains on this machine, and what its time goes into.

Everything is measured in one process: the engine that `atas train` would use, its data alone, the plain eager loop as
reference, and the ceiling of the device (a large matrix product in the same precision), so that ratios hold even where
the machine's speed does not.
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
from atas.distributed.world import select_device
from atas.methods import InputPerturbation
from atas.recipes import Recipe
from atas.training.build import build, build_model
from atas.training.data import load_data
from atas.training.engine import Engine
from atas.training.progress import TrainingProgress

_WARMUP_STEPS = 3
_MIN_EPOCHS = 30  # a schedule that lasts for all rounds, however few steps an epoch has
_ROUNDS = 5
_SIZES = {"cifar10": (50_000, (3, 32, 32), 10), "cifar100": (50_000, (3, 32, 32), 100)}
_FOLDER_EXAMPLES = 2048
_DATA_BOUND = 0.9  # of a step's time that batches take by themselves where it is they that a step waits for


@dataclass(frozen=True)
class Timing:
    """Milliseconds a step: the median over rounds, the fastest and the slowest round."""

    median: float
    low: float
    high: float
    steps: int


@dataclass(frozen=True)
class BenchResult:
    """What a benchmark found."""

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
        """What sets the pace: `data` where batches alone, without a step, come hardly faster than steps; `compute`."""
        return "data" if self.data.median >= _DATA_BOUND * self.step.median else "compute"

    @property
    def achieved(self) -> float:
        """Floating-point operations a second of convolutions and matrix products."""
        return self.flop / (self.step.median * 1e-3)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self) | {"achieved": self.achieved, "limit": self.limit}


def bench(recipe: Recipe, steps: int = 20, progress: TrainingProgress | None = None) -> BenchResult:
    """Time `steps` steps in each of five rounds, after a warm-up; on random images of the recipe's size,
    or on the recipe's own where their way to the device is a part of what is timed."""
    progress = progress or TrainingProgress(quiet=True)
    device = select_device(recipe.engine.device)
    images = _images(recipe)
    engine = _engine(recipe, images, progress)
    began = time.perf_counter()
    engine.prepare(recipe.training.epochs - 1)
    start_up = time.perf_counter() - began
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    step = _time(engine, steps, device)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident_bytes()
    batches_alone = _time_data(engine, steps, device)
    progress.log("timing the plain eager loop ...")
    plain = recipe.with_values({"engine.kind": "eager"})
    reference = _engine(plain, images, progress)
    eager = step if engine.kind == reference.kind else _time(reference, max(3, steps // 10), device)
    stages = _stages(reference, device)
    flop = _flop(reference)
    for used in (engine, reference):
        used.loader.close()
    batches = len(engine.loader)
    epoch = step.median * 1e-3 * (batches - 1 + engine.loader.size(batches - 1) / engine.loader.batch_size)
    return BenchResult(
        recipe=recipe.name,
        batch_size=recipe.training.batch_size,
        engine=engine.kind,
        start_up_seconds=start_up,
        step=step,
        data=batches_alone,
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
    """Random images in the number and size of the recipe's data: speed does not depend on what they show. A packed set,
    or a folder that is streamed, is read itself: how fast it is decoded is a part of what is timed."""
    streamed = recipe.data.name == "imagefolder" and recipe.data.loading == "streaming"
    if streamed or recipe.data.name in ("digits", "packed"):
        return load_data(recipe)
    side = recipe.data.size or data.DEFAULT_SIZE
    count, shape, classes = _SIZES.get(recipe.data.name, (_FOLDER_EXAMPLES, (3, side, side), 10))
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (count, *shape), dtype=torch.uint8, generator=generator)
    labels = torch.randint(classes, (count,), generator=generator)
    split = data.Split(pixels, labels, tuple(str(label) for label in range(classes)))
    return data.Dataset(recipe.data.name, split, split)


def _engine(recipe: Recipe, images: data.Dataset, progress: TrainingProgress) -> Engine:
    recipe = recipe.with_values({"training.epochs": max(recipe.training.epochs, _MIN_EPOCHS)})
    return build(recipe, images, build_model(recipe, images), progress.log).engine


def _time(engine: Engine, steps: int, device: torch.device) -> Timing:
    last = engine.recipe.training.epochs - 1  # past any warm-up of the method
    return _rounds(lambda: engine.start_epoch(last, 0), lambda batch: engine.step(), engine, steps, device)


def _time_data(engine: Engine, steps: int, device: torch.device) -> Timing:
    """The same batches read, brought to the device, cut out and resized, with no step."""
    loader, epoch = engine.loader, engine.method.epoch
    order = loader.order(engine.recipe.training.epochs - 1)
    indices = order.split(loader.batch_size)

    def show(batch: int) -> None:
        loader.prefetch(batch)
        loader.take(indices[batch].to(device), epoch)

    return _rounds(lambda: loader.start_epoch(order, 0), show, engine, steps, device)


def _rounds(
    begin: Callable[[], None], step: Callable[[int], None], engine: Engine, steps: int, device: torch.device
) -> Timing:
    steps = min(steps, max(1, len(engine.loader) - 1))
    found = []
    for _ in range(_ROUNDS + 1):
        begin()
        for batch in range(min(_WARMUP_STEPS, steps)):
            step(batch)
        begin()
        began = _now(device)
        for batch in range(steps):
            step(batch)
        found.append((_now(device) - began) / steps * 1e3)
    found = found[1:]
    return Timing(statistics.median(found), min(found), max(found), steps * _ROUNDS)


def _stages(engine: Engine, device: torch.device) -> dict[str, float]:
    """Shares of an eager step, with the device waited for after every part."""
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
    """Operations of a step's convolutions and matrix products, counted as they are dispatched."""
    engine.start_epoch(engine.recipe.training.epochs - 1, 0)
    with _Counter() as counter:
        engine.step()
    return counter.total


class _Counter(TorchDispatchMode):
    """Adds up what torch's own table knows of each operation. (Its counter also tracks modules, by hooks that do not
    go together with gradients of inputs alone.)"""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        count = flop_registry.get(function._overloadpacket)
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=found)
        return found


def _ceiling(device: torch.device, precision: str) -> float:
    """Operations a second of a large matrix product on random numbers: the best of a few."""
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
