"""Loaders of training batches: the base class, and a loader that keeps all images on the device as uint8."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NotRequired, TypedDict, Unpack

import torch
from torch import Tensor

from atas.core.augment import Flip, View
from atas.core.dispatch import fast_op
from atas.core.resized_crop import AnyView
from atas.core.rng import CounterRNG
from atas.data.lazy_images import LazyImages
from atas.distributed.sharding import DataShard


@dataclass(frozen=True)
class Batch:
    """Input of a training step: images in [0, 1], labels, indices of the examples, and the view of each image."""

    x: Tensor
    y: Tensor
    index: Tensor
    view: AnyView


class LoaderOptions(TypedDict):
    """The arguments that all loaders share besides images and labels."""

    batch_size: int
    pad: int
    flip: Flip
    seed: int
    views: NotRequired[Callable[[CounterRNG], AnyView] | None]


class Loader:
    """Batches of a training set, in an order and with views that depend only on (seed, epoch).

    `set_shard` sets the shard of the training set that images and labels are; by default they are the whole set. An
    index is a row of the shard, and `batch_size` is its share of the global batch. The short last batch is kept; a
    shard may have no example in it. Views are crops of images padded by `pad`, unless `views` draws others. `images`
    are the images on the device, at fixed addresses; `start_epoch` and `prefetch` make those of a step available.
    """

    kind: ClassVar[str]

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        batch_size: int,
        pad: int,
        flip: Flip,
        seed: int,
        views: Callable[[CounterRNG], AnyView] | None = None,
    ) -> None:
        self.images, self.labels = images, labels.to(images.device)
        self.batch_size, self.pad, self.flip, self.seed = batch_size, pad, flip, seed
        self.views = views or (lambda draw: View.draw(draw, self.pad, self.flip))
        self.set_shard(DataShard(len(labels)))

    def set_shard(self, shard: DataShard) -> None:
        """Set the shard of the training set that images and labels are."""
        self.shard = shard

    def start_epoch(self, order: Tensor, first: int) -> None:
        """Start an epoch with this order of examples, at batch `first`; called on the host."""

    def prefetch(self, batch: int) -> None:
        """Make the images of this batch available for the next step on the device; called on the host."""

    def rows(self, index: Tensor) -> Tensor:
        """Return the rows of `images` that hold these examples; here, all examples are on the device."""
        return index

    def close(self) -> None:
        """Release worker processes and other resources."""

    def __len__(self) -> int:
        """Return the number of batches per epoch."""
        return -(-self.shard.examples // self._global_batch_size)

    def size(self, batch: int) -> int:
        """Return the number of examples of a batch in this shard."""
        return max(0, min(self.batch_size, len(self.labels) - batch * self.batch_size))

    def batch_fraction(self, batch: int) -> float:
        """Return the fraction of a global batch that is in this shard."""
        return self.size(batch) / min(self._global_batch_size, self.shard.examples - batch * self._global_batch_size)

    @property
    def _global_batch_size(self) -> int:
        """Examples in a global batch; every shard has the same number."""
        return self.batch_size // self.shard.num_held * self.shard.shards

    def order(self, epoch: int) -> Tensor:
        """Return the order of the examples in an epoch, on the host."""
        return self.shard.order(self.seed, epoch)

    def take(self, index: Tensor, epoch: Tensor) -> Batch:
        """Return these examples with their views of this epoch."""
        view = self.views(CounterRNG(self.seed, epoch, self.shard.global_index(index)))
        return Batch(gather_views(self.images, self.rows(index), view), self.labels[index], index, view)


class DeviceLoader(Loader):
    """A loader with all images on the device."""

    kind = "resident"

    def __init__(
        self, images: Tensor | LazyImages, labels: Tensor, *, device: torch.device, **how: Unpack[LoaderOptions]
    ) -> None:
        super().__init__(images.to(device), labels, **how)


@fast_op
def gather_views(images: Tensor, index: Tensor, view: AnyView) -> Tensor:
    """Cut the views of these examples out of the images, as floats in [0, 1]."""
    return view.apply(images, index).float() / 255
