"""The sections of a recipe: their keys, types and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Data:
    """What is trained on. `size` is the side of stored images, for image folders; a packed set has its own, checked.

    `view` is how images are shown: `pad`, crops of images padded by `pad`; `crop`, crops of `view_size` pixels (224);
    `resized`, boxes with a share of the image in `view_scale` ((0.08, 1)), resized to `view_size`. With `view_start`
    and `view_ramp` the size rises from the one to `view_size` over the first so much of the training.

    `loading` is where the training images are kept: `resident` on the device, `streaming` where they are, from which
    `workers` processes (by default one a processor) read a few batches ahead, or `auto`, resident where they fit.
    `shards`, 1 if it is left out, is into how many parts examples are dealt, of which each of several processes takes
    one or more."""

    name: str = "cifar10"
    root: str | None = None
    size: int | None = None
    pad: int = 4
    flip: bool = True
    view: str = "pad"
    view_size: int | None = None
    view_start: int | None = None
    view_ramp: float | None = None
    view_scale: tuple[float, float] | None = None
    loading: str = "auto"
    workers: int | None = None
    shards: int | None = None


@dataclass(frozen=True)
class Model:
    """The network: a name of `atas ls models` or a factory `package.module:function`."""

    name: str = "preact-resnet18"
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Method:
    """The training method, its threat model, and its own settings (any further keys)."""

    name: str = "atas"
    norm: str = "linf"
    eps: float = 8 / 255
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Optimizer:
    """Stochastic gradient descent."""

    momentum: float = 0.9
    weight_decay: float = 5e-4
    nesterov: bool = False


@dataclass(frozen=True)
class Schedule:
    """The learning rate by update: `piecewise` (drops by `factor` at `milestones`) or `cyclic` (up from 0 to `peak`,
    reached at `peak_at`, and down to 0). Milestones and peak_at are shares of the whole training. With `peak_momentum`
    the momentum of a cyclic training goes from the optimiser's to this one at the peak, and back."""

    name: str = "piecewise"
    peak: float = 0.1
    milestones: tuple[float, ...] = (24 / 30, 28 / 30)
    factor: float = 0.1
    peak_at: float = 0.5
    peak_momentum: float | None = None


@dataclass(frozen=True)
class Training:
    """How long, in which order, and what is watched. `ema` is the decay of averaged weights, 0 for none; `probe` the
    number of training images that the monitor attacks after every epoch, always with the weights themselves, not their
    average; `checkpoint_every` is in seconds; `loggers` are tensorboard (where it is installed) and wandb."""

    epochs: int = 30
    batch_size: int = 128
    seed: int = 0
    ema: float = 0.0
    on_collapse: str = "warn"
    probe: int = 1000
    checkpoint_every: float = 60.0
    loggers: tuple[str, ...] = ("tensorboard",)


@dataclass(frozen=True)
class Engine:
    """How steps are run: `kind` auto (captured on CUDA), eager or captured; `device` auto, cpu or cuda; `precision`
    auto (bf16 on CUDA), bf16 or float32; `deterministic` makes runs on CUDA repeat to the bit, as on the CPU;
    `sync_batchnorm` has BatchNorm normalise by the global batch where several processes train together."""

    kind: str = "auto"
    device: str = "auto"
    precision: str = "auto"
    deterministic: bool = False
    sync_batchnorm: bool = False


@dataclass(frozen=True)
class Evaluation:
    """What `atas evaluate` runs on the test set; `examples` limits it to the first so many."""

    attacks: tuple[str, ...] = ("pgd10", "pgd50")
    examples: int | None = None
    batch_size: int | None = None
