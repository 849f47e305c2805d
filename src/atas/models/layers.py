"""Layers that the networks share: normalisation of pixels, and the pooling before the last layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from atas.errors import UsageError

_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)


class Normalize(nn.Module):
    """`(x - mean) / std` for every channel, in the dtype of x.

    The constants are buffers, so they are saved with the weights and follow the model's device and dtype.
    Weights published without them load strictly all the same, and the constants then stay as they are.

    Args:
        channels: channels of an image.
        mean: one number or one per channel; the default is ImageNet's for 3 channels and 0.5 otherwise.
        std: one positive number or one per channel; the default is ImageNet's or 0.25.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        channels: int,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        if mean is None:
            mean = _IMAGENET_MEAN if channels == 3 else 0.5
        if std is None:
            std = _IMAGENET_STD if channels == 3 else 0.25
        means = _per_channel("mean", mean, channels)
        stds = _per_channel("std", std, channels)
        if not all(s > 0 for s in stds):
            raise UsageError(f"std is {std}; pass numbers greater than 0.")
        self.channels = channels
        self.register_buffer("mean", torch.tensor(means).view(1, channels, 1, 1))
        self.register_buffer("std", torch.tensor(stds).view(1, channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise a batch of images; other shapes and integers are refused, not broadcast or rounded."""
        if x.ndim != 4 or x.shape[1] != self.channels:
            raise UsageError(
                f"images of shape {tuple(x.shape)} do not fit this model; "
                f"pass a batch of shape (N, {self.channels}, H, W)."
            )
        if not x.is_floating_point():
            raise UsageError(f"images are {x.dtype}; divide by 255 to get floating-point pixels in [0, 1].")
        return (x - self.mean.to(x.dtype)) / self.std.to(x.dtype)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        # Missing keys are collected in a list that nobody reads: absent constants are no error.
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, [], unexpected_keys, error_msgs)


def _per_channel(argument: str, value: float | Sequence[float], channels: int) -> list[float]:
    try:
        # On the CPU even where the default device is another, or `meta`.
        numbers = torch.as_tensor(value, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        numbers = torch.tensor(math.nan, device="cpu")
    if numbers.shape not in ((), (channels,)) or not numbers.isfinite().all():
        raise UsageError(
            f"{argument} is {value!r} for images of {channels} channel{'s' * (channels != 1)}; "
            f"pass one finite number, or a sequence of {channels}."
        )
    return numbers.expand(channels).tolist()


def spatial_mean(x: Tensor, window: int | None) -> Tensor:
    """Return the mean over all pixels, or over the first `window` rows and columns."""
    return (x if window is None else x[..., :window, :window]).mean((2, 3))
