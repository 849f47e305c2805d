"""Small images to show: at most 64 pixels per side, one byte per channel."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

SIDE = 64
GREY = 128  # of a pixel that a perturbation does not change


def thumbnails(images: Tensor) -> Tensor:
    """Shrink images (N, C, H, W) with pixels in [0, 1] to at most 64 pixels a side, as uint8 on their device.

    >>> import torch
    >>> thumbnails(torch.ones(1, 3, 128, 96)).shape, int(thumbnails(torch.full((1, 1, 2, 2), 0.5)).max())
    (torch.Size([1, 3, 64, 48]), 128)
    """
    height, width = images.shape[2:]
    if (longest := max(height, width)) > SIDE:
        size = [max(round(side * SIDE / longest), 1) for side in (height, width)]
        images = F.interpolate(images, size=size, mode="area")
    return (images.clamp(0, 1) * 255).round().byte()


def perturbation_thumbnails(deltas: Tensor) -> Tensor:
    """Shrink perturbations (N, C, H, W), each scaled so that its largest entry is black or white; grey is no change.

    >>> import torch
    >>> perturbation_thumbnails(torch.tensor([0.1, 0.0, -0.1]).view(1, 1, 1, 3)).flatten().tolist()
    [255, 128, 0]
    """
    largest = deltas.abs().amax((1, 2, 3), keepdim=True)
    return thumbnails(deltas / (2 * largest.masked_fill(largest == 0, 1)) + 0.5)
