"""The resident loader: the whole training set on the device as uint8, batches cut out of it by index."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from atas.augment import View
from atas.boxes import AnyView
from atas.fusing import fusable
from atas.noise import Draw, Purpose, seed_for


@dataclass(frozen=True)
class Batch:
    """What a training step gets: images in [0, 1], labels, which examples they are, and how each is shown."""

    x: Tensor
    y: Tensor
    index: Tensor
    view: AnyView


class Resident:
    """Batches of a training set that fits the device, in an order and with views that depend on (seed, epoch) alone.

    The short last batch is kept. Views are crops of images padded by `pad` unless `views` draws others.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        batch_size: int,
        pad: int,
        flip: bool,
        seed: int,
        device: torch.device,
        views: Callable[[Draw], AnyView] | None = None,
    ) -> None:
        self.images, self.labels = images.to(device), labels.to(device)
        self.batch_size, self.pad, self.flip, self.seed = batch_size, pad, flip, seed
        self.views = views or (lambda draw: View.draw(draw, self.pad, self.flip))

    def __len__(self) -> int:
        """Batches in an epoch."""
        return -(-len(self.labels) // self.batch_size)

    def size(self, batch: int) -> int:
        """Examples in a batch of an epoch."""
        return min(self.batch_size, len(self.labels) - batch * self.batch_size)

    def order(self, epoch: int) -> Tensor:
        """The order of the examples in an epoch, on the host."""
        generator = torch.Generator().manual_seed(seed_for(self.seed, epoch, Purpose.ORDER))
        return torch.randperm(len(self.labels), generator=generator)

    def take(self, index: Tensor, epoch: Tensor) -> Batch:
        """These examples as they are shown in this epoch."""
        view = self.views(Draw(self.seed, epoch, index))
        return Batch(_show(self.images, index, view), self.labels[index], index, view)


@fusable
def _show(images: Tensor, index: Tensor, view: AnyView) -> Tensor:
    return view.apply(images, index).float() / 255
