"""Common corruptions of images: noise, blur, light and compression, at severities from 1 to 5.

They are like those of CIFAR-10-C and ImageNet-C (Hendrycks and Dietterich, 2019), but written by ourselves in PyTorch:
figures are not those of the official files. Blur scales with the side of images above 32 pixels. Noise is hashed from
the seed and the example's index, so it depends neither on the batch nor on the device.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from atas.core.arguments import check_argument
from atas.core.rng import CounterRNG, Stream
from atas.data.decode import open_image
from atas.errors import UsageError, unknown
from atas.threat import Threat

SEVERITIES = (1, 2, 3, 4, 5)
_SIDE = 32  # lengths are for images of this side
_Corrupt = Callable[[Tensor, float, CounterRNG], Tensor]


def _gaussian_noise(x: Tensor, scale: float, rng: CounterRNG) -> Tensor:
    return x + scale * rng.normal(Stream.CORRUPTION, x.shape[1:]).to(x)


def _shot_noise(x: Tensor, photons: float, rng: CounterRNG) -> Tensor:
    """Gaussian noise whose variance is proportional to the intensity, as that of photons is."""
    return x + (x / photons).sqrt() * rng.normal(Stream.CORRUPTION, x.shape[1:]).to(x)


def _impulse_noise(x: Tensor, share: float, rng: CounterRNG) -> Tensor:
    """Set a share of the values to 0 or 1."""
    number = rng.uniform(Stream.CORRUPTION, x.shape[1:]).to(x)
    return torch.where(number < share / 2, 0.0, torch.where(number < share, 1.0, x))


def _gaussian_blur(x: Tensor, sigma: float, rng: CounterRNG) -> Tensor:
    sigma = sigma * _scale(x)
    offsets = torch.arange(-math.ceil(3 * sigma), math.ceil(3 * sigma) + 1, dtype=torch.float64)
    weights = torch.exp(-0.5 * (offsets / sigma) ** 2)
    return _filter(x, weights[:, None] * weights)


def _defocus_blur(x: Tensor, radius: float, rng: CounterRNG) -> Tensor:
    """Average over a disk; a pixel at its edge counts in part."""
    radius = radius * _scale(x)
    offsets = torch.arange(-math.ceil(radius), math.ceil(radius) + 1, dtype=torch.float64)
    distance = (offsets[:, None] ** 2 + offsets**2).sqrt()
    return _filter(x, (radius + 0.5 - distance).clamp(0, 1))


def _scale(x: Tensor) -> float:
    """Return the factor of lengths: images larger than 32 pixels are blurred more."""
    return max(min(x.shape[2:]) / _SIDE, 1.0)


def _filter(x: Tensor, kernel: Tensor) -> Tensor:
    """Return the average with these weights around each pixel; beyond the edges are the pixels at the edges."""
    channels, reach = x.shape[1], len(kernel) // 2
    weights = (kernel / kernel.sum()).to(x).expand(channels, 1, -1, -1)
    return F.conv2d(F.pad(x, (reach,) * 4, mode="replicate"), weights, groups=channels)


def _brightness(x: Tensor, added: float, rng: CounterRNG) -> Tensor:
    return x + added


def _contrast(x: Tensor, factor: float, rng: CounterRNG) -> Tensor:
    mean = x.mean((2, 3), keepdim=True)
    return mean + factor * (x - mean)


def _pixelate(x: Tensor, share: float, rng: CounterRNG) -> Tensor:
    """Average over larger pixels; `share` is their number along a side relative to the image."""
    height, width = x.shape[2:]
    small = F.interpolate(
        x, (max(round(height * share), 1), max(round(width * share), 1)), mode="bilinear", antialias=True
    )
    return F.interpolate(small, (height, width), mode="nearest-exact")


def _jpeg(x: Tensor, quality: float, rng: CounterRNG) -> Tensor:
    pixels = (x * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    coded = [torch.from_numpy(_recode(image, int(quality))) for image in pixels]
    return (torch.stack(coded).to(x.device).to(x.dtype) / 255).reshape(len(x), *x.shape[2:], -1).permute(0, 3, 1, 2)


def _recode(pixels: np.ndarray, quality: int) -> np.ndarray:
    file = io.BytesIO()
    Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels).save(file, "JPEG", quality=quality)
    with open_image(file) as coded:
        return np.array(coded)


_CORRUPTIONS: dict[str, tuple[_Corrupt, tuple[float, ...]]] = {
    "gaussian-noise": (_gaussian_noise, (0.04, 0.06, 0.08, 0.10, 0.12)),
    "shot-noise": (_shot_noise, (500, 250, 100, 75, 50)),
    "impulse-noise": (_impulse_noise, (0.01, 0.02, 0.03, 0.05, 0.07)),
    "gaussian-blur": (_gaussian_blur, (0.4, 0.6, 0.7, 0.8, 1.0)),
    "defocus-blur": (_defocus_blur, (0.6, 0.8, 1.0, 1.3, 1.7)),
    "brightness": (_brightness, (0.05, 0.10, 0.15, 0.20, 0.30)),
    "contrast": (_contrast, (0.75, 0.50, 0.40, 0.30, 0.15)),
    "pixelate": (_pixelate, (0.90, 0.70, 0.55, 0.45, 0.30)),
    "jpeg": (_jpeg, (80, 65, 58, 50, 40)),
}


def names() -> list[str]:
    """Return the names of corruptions.

    >>> names()[:3]
    ['gaussian-noise', 'shot-noise', 'impulse-noise']
    """
    return list(_CORRUPTIONS)


@dataclass(frozen=True)
class Corruption:
    """A corruption at one severity, in the form of an attack; it ignores the model and the threat model."""

    kind: str
    severity: int

    def __post_init__(self) -> None:
        if self.kind not in _CORRUPTIONS:
            raise unknown("corruption", self.kind, names())
        if self.severity not in SEVERITIES:
            raise UsageError(f"severity must be one of 1 to {len(SEVERITIES)}; got {self.severity}")

    @property
    def name(self) -> str:
        """The name with the severity."""
        return f"{self.kind}-{self.severity}"

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise UsageError unless images of this shape (C, H, W) can be corrupted."""
        if self.kind == "jpeg" and shape[0] not in (1, 3):
            raise UsageError(f"jpeg needs images of 1 or 3 channels; got {shape[0]}: name other corruptions")

    def settings(self, threat: Threat) -> dict[str, Any]:
        """Return the parameter."""
        return {"value": _CORRUPTIONS[self.kind][1][self.severity - 1]}

    def __call__(
        self,
        model: nn.Module | None,
        x: Tensor,
        y: Tensor | None,
        threat: Threat | None,
        *,
        seed: int = 0,
        index: Tensor | None = None,
    ) -> Tensor:
        """Return the corrupted images."""
        function, values = _CORRUPTIONS[self.kind]
        stream = torch.full((), names().index(self.kind) * 8 + self.severity, dtype=torch.int64, device=x.device)
        index = torch.arange(len(x), device=x.device) if index is None else index
        with torch.no_grad():
            return function(x, values[self.severity - 1], CounterRNG(seed, stream, index)).clamp(0, 1)


def resolve(requested: Iterable[str] | str) -> dict[str, Corruption]:
    """Return corruptions at every severity by name; `all` stands for every corruption."""
    kinds = [kind.strip() for kind in requested.split(",")] if isinstance(requested, str) else list(requested)
    for kind in kinds:
        check_argument("a corruption", kind, str)
    kinds = names() if kinds == ["all"] else list(dict.fromkeys(kinds))
    found = [Corruption(kind, severity) for kind in kinds for severity in SEVERITIES]
    return {corruption.name: corruption for corruption in found}
