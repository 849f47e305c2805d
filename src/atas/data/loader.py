"""Loaders of training batches: the base class, and the loader whose images all lie on the device as uint8."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NotRequired, TypedDict, Unpack

import torch
from torch import Tensor

from atas.core.augment import View
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
    """What all batches take besides images and labels."""

    batch_size: int
    pad: int
    flip: bool
    seed: int
    views: NotRequired[Callable[[CounterRNG], AnyView] | None]


class Loader:
    """Batches of a training set, in an order and with views that depend on (seed, epoch) alone.

    `set_shard` says which part of a training set images and labels are; without it they are the whole. An index is a
    row of that part, and `batch_size` its share of a global batch. The short last batch is kept, though a part may have
    nothing in it. Views are crops of images padded by `pad` unless `views` draws others. `images` are those that are on
    the device, at addresses that do not change; `start_epoch` and `prefetch` see to it that those of a step are there
    before it runs.
    """

    kind: ClassVar[str]

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        batch_size: int,
        pad: int,
        flip: bool,
        seed: int,
        views: Callable[[CounterRNG], AnyView] | None = None,
    ) -> None:
        self.images, self.labels = images, labels.to(images.device)
        self.batch_size, self.pad, self.flip, self.seed = batch_size, pad, flip, seed
        self.views = views or (lambda draw: View.draw(draw, self.pad, self.flip))
        self.set_shard(DataShard(len(labels)))

    def set_shard(self, shard: DataShard) -> None:
        """Images and labels are this part of the training set."""
        self.shard = shard

    def start_epoch(self, order: Tensor, first: int) -> None:
        """An epoch begins, in this order and with this batch; called on the host."""

    def prefetch(self, batch: int) -> None:
        """Have the images of this batch in place for what the device does next; called on the host."""

    def rows(self, index: Tensor) -> Tensor:
        """Where in `images` these examples of the staged batch are."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what is not memory."""

    def __len__(self) -> int:
        """Batches in an epoch."""
        return -(-self.shard.examples // self._global_batch_size)

    def size(self, batch: int) -> int:
        """Examples in this part of a batch of an epoch."""
        return max(0, min(self.batch_size, len(self.labels) - batch * self.batch_size))

    def batch_fraction(self, batch: int) -> float:
        """This part's share of the examples in a batch."""
        return self.size(batch) / min(self._global_batch_size, self.shard.examples - batch * self._global_batch_size)

    @property
    def _global_batch_size(self) -> int:
        """Examples in a global batch; every shard gives as many."""
        return self.batch_size // self.shard.num_held * self.shard.shards

    def order(self, epoch: int) -> Tensor:
        """The order of the examples in an epoch, on the host."""
        return self.shard.order(self.seed, epoch)

    def take(self, index: Tensor, epoch: Tensor) -> Batch:
        """These examples as they are shown in this epoch."""
        view = self.views(CounterRNG(self.seed, epoch, self.shard.global_index(index)))
        return Batch(gather_views(self.images, self.rows(index), view), self.labels[index], index, view)


class DeviceLoader(Loader):
    """All images on the device."""

    kind = "resident"

    def __init__(
        self, images: Tensor | LazyImages, labels: Tensor, *, device: torch.device, **how: Unpack[LoaderOptions]
    ) -> None:
        super().__init__(images.to(device), labels, **how)

    def rows(self, index: Tensor) -> Tensor:
        """Every example has its own."""
        return index


@fast_op
def gather_views(images: Tensor, index: Tensor, view: AnyView) -> Tensor:
    """Cut the views of these examples out of the images, as floats in [0, 1]."""
    return view.apply(images, index).float() / 255
