"""Attacks that start from a perturbation of their own for each training example, kept in random corners at first.

FGSM-PGI and FGSM-PCO have in common how they keep it: it stays in place while the image is cropped and flipped below it
(`frame="view"`), as in their authors' code, or follows the image (`frame="image"`), as in ATTA and ATAS. The start may
leave [0, 1]. Labels are smoothed over the other classes, in attack and loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atas.core.augment import View
from atas.core.autograd import to_float32
from atas.core.dispatch import fast_op
from atas.core.perturbations import FullResolution
from atas.core.resized_crop import AnyView
from atas.core.validation import check_logits
from atas.data.loader import Batch
from atas.distributed.sharding import DataShard
from atas.errors import DataError
from atas.methods.base import CommonArgs, InputPerturbation
from atas.methods.targets import LabelTargets
from atas.threat import Threat

Frame: TypeAlias = Literal["view", "image"]


class PriorPerturbation(InputPerturbation):
    """What FGSM-PGI and FGSM-PCO have in common. `memory` has a perturbation for each example. It is zero until the
    class that adds its own state calls `reset`."""

    fixed_size = True
    own_targets = ("smoothing",)
    checks_indices = True

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        smoothing: float,
        frame: Frame,
        dtype: torch.dtype | Literal["auto"],
        **common: Unpack[CommonArgs],
    ) -> None:
        common["targets"] = LabelTargets(smoothing=smoothing, noise="others")
        super().__init__(threat, examples, shape, **common)
        self.smoothing, self.frame = smoothing, frame
        self.memory = self.make_store(dtype)

    def make_store(self, dtype: torch.dtype | Literal["auto"]) -> FullResolution:
        """Return a store with a row of zeros for each example, in this method's frame."""
        pad = self.pad if self.frame == "image" else 0
        return FullResolution(self.threat, self.examples, self.shape, pad=pad, dtype=dtype, device=self.epoch.device)

    def set_shard(self, shard: DataShard) -> None:
        """Start with the corners of this shard's examples."""
        super().set_shard(shard)
        self.reset(0)

    def reset(self, epoch: int) -> None:
        """Set the perturbations to random corners of the ball."""
        self.memory.reset(self.seed, epoch, self.shard.global_index, corners=True)

    def start(self, batch: Batch) -> Tensor:
        """Return the images with their stored perturbations, which may leave [0, 1]."""
        return batch.x + self.memory.load(batch.index, self.view_of(batch), batch.x.dtype)

    def batchnorm_inputs(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the images with their stored perturbations, which costs no attack."""
        return self.threat.project(self.start(batch), batch.x)

    def attack_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the summed cross-entropy with the smoothed labels."""
        y = self.checks.labels(y, check_logits(logits, len(y)).shape[1])
        return smoothed_cross_entropy_sum(logits, y, self.smoothing)

    def view_of(self, batch: Batch) -> AnyView:
        """Return the view by which stored perturbations are read and written."""
        if self.frame == "image":
            return batch.view
        if batch.x.shape[1:] != self.memory.delta.shape[1:]:
            raise DataError(
                f"{type(self).__name__} keeps perturbations of the images as shown, of one shape, {tuple(self.shape)} "
                f"here; show images at that size, or use atta with grid=32"
            )
        return View.centre(len(batch.x), 0, batch.x.device)


@fast_op
def smoothed_cross_entropy_sum(logits: Tensor, y: Tensor, smoothing: float) -> Tensor:
    """Return the summed cross-entropy with labels of which the other classes have this share."""
    classes = logits.shape[1]
    of_all = smoothing * classes / (classes - 1)  # PyTorch's share goes to the true class too
    return F.cross_entropy(to_float32(logits), y, reduction="sum", label_smoothing=of_all)
