"""Settings of a training, from its data, network and number of epochs: pure functions of numbers.

The method is `atas-plus`. Its settings are interpolated between the recipes of 10 to 300 epochs for CIFAR-10. Crops,
batch size and networks to try follow from the images.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from atas.errors import UsageError

_MIN_HELD_OUT, _MAX_HELD_OUT = 100, 5000
_LEAST_IMAGES = 10  # that can be split into training and test images
_UPDATES_PER_EPOCH = 24  # at least, if the batch is not the smallest
_MIN_BATCH, _MAX_BATCH = 16, 128
_SMALL, _LARGE = 24, 64  # sides in pixels at which the choice of network changes
_GRID, _STORED_IN_FULL = 32, 96  # side of stored perturbations; largest side that is stored at full resolution
_UPRIGHT = ("digits", "mnist", "svhn")  # data whose classes a flip changes


@dataclass(frozen=True)
class Task:
    """The problem: number of training images, their shape (C, H, W), whether they are grey, name of the data, and
    eps."""

    images: int
    shape: tuple[int, int, int]
    grey: bool
    data: str
    eps: float

    @property
    def side(self) -> int:
        """The short side of an image in pixels."""
        return min(self.shape[1:])

    @property
    def flips(self) -> bool:
        """Whether training images are flipped. Grey images are often digits or letters, which a flip changes."""
        return not self.grey and self.data not in _UPRIGHT


@dataclass(frozen=True)
class Network:
    """The properties of a network that settings depend on: whether it has BatchNorm, whether its weights are trained,
    and whether it has many layers."""

    batchnorm: bool = True
    trained: bool = False
    deep: bool = True


def held_out_images(images: int) -> int:
    """Return how many of the training images to hold out as test images: a tenth, from 100 to 5,000, at most a third.

    >>> held_out_images(2000), held_out_images(200), held_out_images(100_000)
    (200, 66, 5000)
    """
    if images < _LEAST_IMAGES:
        raise UsageError(f"there are {images} images in all, too few to train and to test on; add some")
    return min(max(images // 10, _MIN_HELD_OUT), _MAX_HELD_OUT, images // 3)


def networks(shape: Sequence[int]) -> tuple[str, ...]:
    """Return networks for images of this shape, the best first; a later one is for less time.

    >>> networks((1, 8, 8)), networks((3, 32, 32)), networks((3, 224, 224))
    (('small-cnn',), ('preact-resnet18', 'small-cnn'), ('resnet18',))
    """
    side = min(shape[1:])
    if side < _SMALL:
        return ("small-cnn",)
    return ("preact-resnet18", "small-cnn") if side < _LARGE else ("resnet18",)


def batch_size(images: int) -> int:
    """Return the batch size for this number of images: a power of two, 16 to 128, that gives an epoch 24 updates.

    >>> batch_size(200), batch_size(1297), batch_size(50_000)
    (16, 32, 128)
    """
    share = max(images // _UPDATES_PER_EPOCH, 1)
    return min(max(2 ** int(math.log2(share)), _MIN_BATCH), _MAX_BATCH)


def without_single(batch: int, images: int) -> int:
    """Return the batch size, or the next larger one after which no batch of an epoch has a single image.

    BatchNorm has no variance of one value.

    >>> without_single(16, 33), without_single(16, 40)
    (17, 16)
    """
    while images > 1 and images % batch == 1:
        batch += 1
    return batch


def recipe_values(task: Task, network: Network, batch: int, epochs: int, steps: int) -> dict[str, Any]:
    """Return values of a recipe by dotted keys, for a training of `epochs` epochs of `steps` steps."""
    share, decay, peak_at = (_interpolate(epochs, points) for points in (_SHARE, _DECAY, _PEAK_AT))
    warmup = min(5, epochs // 5)
    return {
        "data.pad": min(task.side // 8, task.side - 1),
        "data.flip": task.flips,
        "method.name": "atas-plus",
        "method.norm": "linf",
        "method.eps": task.eps,
        "method.c": "auto",
        "method.max_step": "auto",
        "method.clip": "auto",
        "method.share": share,
        "method.decay": decay,
        "method.from_epoch": warmup,
        "method.warmup_epochs": warmup,
        **({"method.grid": _GRID} if max(task.shape[1:]) > _STORED_IN_FULL else {}),
        **_optimizer_values(network, batch, peak_at),
        "training.epochs": epochs,
        "training.batch_size": batch,
        "training.ema": averaging(epochs * steps),
        "training.on_collapse": "rollback",
        "training.loggers": (),
    }


# Settings of the recipes by their epochs: share and decay of the remembered predictions, and the learning rate's peak.
_SHARE = ((3, 0.0), (10, 0.2), (30, 0.4), (100, 0.7))
_DECAY = ((30, 0.7), (100, 0.9))
_PEAK_AT = ((30, 0.4), (100, 0.1))
_HORIZON = (500, 3910, 0.68)  # of averaged weights, in updates: of the recipe of 10 epochs, and its growth


def _interpolate(epochs: int, points: Sequence[tuple[int, float]]) -> float:
    """Return the value at a number of epochs, linear in its logarithm between the points, and constant outside.

    >>> _interpolate(2, _SHARE), _interpolate(30, _SHARE), _interpolate(55, _SHARE), _interpolate(500, _SHARE)
    (0.0, 0.4, 0.55, 0.7)
    """
    if epochs <= points[0][0]:
        return points[0][1]
    for (left, low), (right, high) in itertools.pairwise(points):
        if epochs <= right:
            return round(low + (high - low) * math.log(epochs / left) / math.log(right / left), 2)
    return points[-1][1]


def averaging(updates: int) -> float:
    """Return the decay of averaged weights: its horizon grows with the training, and is an eighth of it at most.

    >>> averaging(3910), averaging(39_100), averaging(800)
    (0.998, 0.99958, 0.99)
    """
    at_first, of_updates, growth = _HORIZON
    horizon = min(at_first * (updates / of_updates) ** growth, updates / 8)
    return 0.0 if horizon < 2 else float(f"{1 - 1 / horizon:.{2 + int(math.log10(horizon))}f}")


def _optimizer_values(network: Network, batch: int, peak_at: float) -> dict[str, Any]:
    """Return the optimiser and the learning rate; that of trained weights is a quarter, so that they are not lost."""
    factor = _FINE_TUNING if network.trained else 1.0
    if network.batchnorm:
        # With the root, a ResNet-18 on 436 photos in batches of 16 learns nothing in 8 epochs; a small network more.
        scale = min(1.0, batch / _MAX_BATCH)
        peak = _SGD_PEAK * factor * (scale if network.deep else math.sqrt(scale))
        return {
            "optimizer.name": "sgd",
            "optimizer.momentum": 0.9,
            "optimizer.weight_decay": 5e-4,
            "schedule.name": "cyclic",
            "schedule.peak": float(f"{peak:.2g}"),
            "schedule.peak_at": peak_at,
            "schedule.final": 0.05,
        }
    return {
        "optimizer.name": "adamw",
        "optimizer.weight_decay": 0.05,
        "optimizer.decay_norms": False,
        "optimizer.clip_norm": 1.0,
        "schedule.name": "cosine",
        "schedule.peak": float(f"{_ADAM_PEAK * factor:.2g}"),
        "schedule.warmup": 0.05,
        "schedule.final": 0.01,
    }


_SGD_PEAK, _ADAM_PEAK, _FINE_TUNING = 0.2, 1e-3, 0.25
