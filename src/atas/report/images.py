"""Images for the page, embedded as small PNG files."""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image
from torch import Tensor

from atas.report.html import Markup, tag

SIDE = 64  # pixels, at most: a page of photographs stays small

# Cividis: its lightness rises evenly, for colour-blind readers too.
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


def image(pixels: Tensor, alt: str) -> Markup:
    """An image (C, H, W) with pixels in [0, 1]; grey with one channel, colour with three."""
    values = (pixels.detach().float().clamp(0, 1) * 255).round().byte().cpu().numpy()
    if len(values) not in (1, 3):
        values = values[:1]
    picture = Image.fromarray(values[0] if len(values) == 1 else np.ascontiguousarray(values.transpose(1, 2, 0)))
    picture.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    return _element(picture, alt, pixelated=max(picture.size) < SIDE)


def perturbation(delta: Tensor, alt: str) -> Markup:
    """A perturbation, magnified until its largest entry is black or white; grey is no change."""
    largest = float(delta.abs().max()) or 1.0
    return image(delta / (2 * largest) + 0.5, alt)


def heat_map(values: Tensor, most: float, alt: str) -> Markup:
    """A matrix in colours from 0, dark, to `most`, light; the first row is at the bottom."""
    place = values.detach().double().flip(0).cpu().numpy() / most * (len(_CIVIDIS) - 1)
    ends = np.arange(len(_CIVIDIS))
    colours = np.stack([np.interp(place, ends, _CIVIDIS[:, channel]) for channel in range(3)], -1)
    picture = Image.fromarray(colours.round().astype(np.uint8))
    return _element(picture, alt, pixelated=False)


def _element(picture: Image.Image, alt: str, *, pixelated: bool) -> Markup:
    out = io.BytesIO()
    picture.save(out, "PNG", optimize=True)
    return tag(
        "img",
        src=f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode('ascii')}",
        alt=alt,
        width=picture.width,
        height=picture.height,
        class_="pixels" if pixelated else None,
    )
