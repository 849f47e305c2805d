"""Images for the page, embedded as small PNG files."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass

import numpy as np
from PIL import Image
from torch import Tensor

from atas.core.thumbnails import SIDE

# Cividis: lightness rises evenly, also for colour-blind readers.
_CIVIDIS = np.array(
    [
        (0, 32, 77),
        (0, 51, 112),
        (53, 69, 108),
        (79, 88, 108),
        (102, 106, 112),
        (125, 125, 120),
        (149, 144, 120),
        (174, 165, 113),
        (200, 186, 101),
        (228, 209, 79),
        (255, 233, 69),
    ],
    dtype=np.float64,
)


@dataclass(frozen=True)
class Picture:
    """A PNG as a data URI, with its text alternative."""

    src: str
    alt: str
    width: int
    height: int
    pixelated: bool


def image(pixels: Tensor, alt: str) -> Picture:
    """Encode a thumbnail (C, H, W), uint8; other than one or three channels show the first only."""
    values = pixels.numpy()
    if len(values) not in (1, 3):
        values = values[:1]
    picture = Image.fromarray(values[0] if len(values) == 1 else np.ascontiguousarray(values.transpose(1, 2, 0)))
    return _encode(picture, alt, pixelated=max(picture.size) < SIDE)


def heat_map(values: Tensor, limit: float, alt: str) -> Picture:
    """Encode a matrix in colours from 0 (dark) to `limit` (light); the first row is at the bottom."""
    position = values.detach().double().flip(0).cpu().numpy() / limit * (len(_CIVIDIS) - 1)
    ends = np.arange(len(_CIVIDIS))
    colours = np.stack([np.interp(position, ends, _CIVIDIS[:, channel]) for channel in range(3)], -1)
    picture = Image.fromarray(colours.round().astype(np.uint8))
    return _encode(picture, alt, pixelated=False)


def _encode(picture: Image.Image, alt: str, *, pixelated: bool) -> Picture:
    out = io.BytesIO()
    picture.save(out, "PNG", optimize=True)
    src = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode('ascii')}"
    return Picture(src, alt, picture.width, picture.height, pixelated)
