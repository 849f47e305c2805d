"""Batches of a training set, and the resident loader: all images on the device as uint8, batches cut out by index."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NotRequired, TypedDict, Unpack

import torch
from torch import Tensor

from atas.augment import View
from atas.boxes import AnyView
from atas.data._stored import Stored
from atas.fusing import fusable
from atas.noise import Draw
from atas.parts import Part


@dataclass(frozen=True)
class Batch:
    """What a training step gets: images in [0, 1], labels, which examples they are, and how each is shown."""

    x: Tensor
    y: Tensor
    index: Tensor
    view: AnyView


class Sampling(TypedDict):
    """What all batches take besides images and labels."""

    batch_size: int
    pad: int
    flip: bool
    seed: int
    views: NotRequired[Callable[[Draw], AnyView] | None]


class Batches:
    """Batches of a training set, in an order and with views that depend on (seed, epoch) alone.

    `own` says which part of a training set images and labels are; without it they are the whole. An index is a row of
    that part, and `batch_size` its share of a global batch. The short last batch is kept, though a part may have
    nothing in it. Views are crops of images padded by `pad` unless `views` draws others. `images` are
    those that are on the device, at addresses that do not change; `begin` and `stage` see to it that those of a step
    are there before it runs.
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
        views: Callable[[Draw], AnyView] | None = None,
    ) -> None:
        self.images, self.labels = images, labels.to(images.device)
        self.batch_size, self.pad, self.flip, self.seed = batch_size, pad, flip, seed
        self.views = views or (lambda draw: View.draw(draw, self.pad, self.flip))
        self.own(Part(len(labels)))

    def own(self, part: Part) -> None:
        """Images and labels are this part of the training set."""
        self.part = part

    def begin(self, order: Tensor, first: int) -> None:
        """An epoch begins, in this order and with this batch; called on the host."""

    def stage(self, batch: int) -> None:
        """Have the images of this batch in place for what the device does next; called on the host."""

    def rows(self, index: Tensor) -> Tensor:
        """Where in `images` these examples of the staged batch are."""
        raise NotImplementedError

    def close(self) -> None:
        """Give back what is not memory."""

    def __len__(self) -> int:
        """Batches in an epoch."""
        return -(-self.part.examples // self._whole_size)

    def size(self, batch: int) -> int:
        """Examples in this part of a batch of an epoch."""
        return max(0, min(self.batch_size, len(self.labels) - batch * self.batch_size))

    def share(self, batch: int) -> float:
        """This part's share of the examples in a batch."""
        return self.size(batch) / min(self._whole_size, self.part.examples - batch * self._whole_size)

    @property
    def _whole_size(self) -> int:
        """Examples in a global batch; every shard gives as many."""
        return self.batch_size // self.part.held * self.part.shards

    def order(self, epoch: int) -> Tensor:
        """The order of the examples in an epoch, on the host."""
        return self.part.order(self.seed, epoch)

    def take(self, index: Tensor, epoch: Tensor) -> Batch:
        """These examples as they are shown in this epoch."""
        view = self.views(Draw(self.seed, epoch, self.part.numbers(index)))
        return Batch(_show(self.images, self.rows(index), view), self.labels[index], index, view)


class Resident(Batches):
    """All images on the device."""

    kind = "resident"

    def __init__(
        self, images: Tensor | Stored, labels: Tensor, *, device: torch.device, **how: Unpack[Sampling]
    ) -> None:
        super().__init__(images.to(device), labels, **how)

    def rows(self, index: Tensor) -> Tensor:
        """Every example has its own."""
        return index


@fusable
def _show(images: Tensor, index: Tensor, view: AnyView) -> Tensor:
    return view.apply(images, index).float() / 255
