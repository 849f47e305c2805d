"""Decode image files of any kind to RGB pixels of a common size.

Files may come from anywhere. `open_image` is the only place that opens one.
"""

from __future__ import annotations

import io
import stat
from pathlib import Path
from typing import TypeGuard

import numpy as np
from PIL import Image, ImageOps
from PIL.ImageFile import ImageFile

# Pillow goes by the content of a file, not by its name, and would start Ghostscript for one that begins like EPS.
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
MAX_PIXELS = 178_956_970  # half a gigabyte in RGB; Pillow's own limit, unless a program has changed that

FITS = ("crop", "squash", "keep")

_DRAFT_FACTOR = 2  # JPEG files are decoded at half, a quarter or an eighth, down to this multiple of the size
_SIXTEEN_BIT_FORMATS = ("PNG", "PPM")  # formats whose mode I has 16 bits; in TIFF it has 32
_MAX_SIDE = 65500  # of JPEG, in pixels; an image of 1 x 30,000 resized to 256 would take 6 GB


def open_image(source: Path | io.BytesIO) -> ImageFile:
    """Open an image without decoding it; raise ValueError or OSError for what is no image of a usual format."""
    if isinstance(source, Path):
        status = source.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe waits forever, and a device has no end
            raise ValueError("it is not a regular file")
        if not status.st_size:
            raise ValueError("the file is empty")
    try:
        file = Image.open(source, formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise ValueError(f"it has more than {MAX_PIXELS:,} pixels") from error
    if file.width * file.height > MAX_PIXELS:
        file.close()
        raise ValueError(f"it is {file.width} x {file.height} pixels, more than {MAX_PIXELS:,}")
    return file


def read_image(source: Path | io.BytesIO) -> Image.Image:
    """Return an image in its own mode and size, upright; raise exceptions of many kinds, as `decode` does."""
    with open_image(source) as file:
        if file.mode == "I" and file.format not in _SIXTEEN_BIT_FORMATS:
            raise ValueError("its pixels have more than 16 bits")
        image = ImageOps.exif_transpose(file)
        image.load()
        return image


def decode(source: Path | io.BytesIO, size: int, fit: str = "crop") -> Image.Image:
    """Return the image in RGB, upright, with its short side resized to `size` pixels.

    `crop` keeps the central square, `keep` the whole image; `squash` resizes the whole image to a square. Damaged files
    raise exceptions of many kinds; `error_text` describes them.
    """
    with open_image(source) as file:
        file.draft(None, (_DRAFT_FACTOR * size, _DRAFT_FACTOR * size))
        if file.mode == "I" and file.format not in _SIXTEEN_BIT_FORMATS:
            raise ValueError("its pixels have more than 16 bits")
        image = to_rgb(ImageOps.exif_transpose(file))
    return resize(image, size, fit)


def resize(image: Image.Image, size: int, fit: str = "crop") -> Image.Image:
    """Return an image with its short side resized to `size` pixels; see `decode`."""
    # Pillow's bilinear filter widens with the reduction, so small sizes do not alias.
    if fit == "squash":
        return image.resize((size, size), Image.Resampling.BILINEAR)
    short = min(image.size)
    width, height = (max(size, round(side * size / short)) for side in image.size)
    if max(width, height) > _MAX_SIDE:
        raise ValueError(f"it is {image.width} x {image.height} pixels, too narrow for its length")
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    if fit == "keep":
        return resized
    left, top = (width - size) // 2, (height - size) // 2
    return resized.crop((left, top, left + size, top + size))


def to_chw(image: Image.Image) -> np.ndarray:
    """Return the pixels of an RGB image as (3, height, width)."""
    return np.asarray(image).transpose(2, 0, 1)


def error_text(error: Exception) -> str:
    """Return why an image could not be decoded."""
    # Pillow appends the path or the object, which messages name already.
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text.split(" '")[0].split(" <")[0] or type(error).__name__


def is_io_error(error: Exception) -> TypeGuard[OSError]:
    """Return whether a file could not be read; it need not be damaged. Only errors of the system have a number."""
    return isinstance(error, OSError) and error.errno is not None


def to_rgb(image: Image.Image) -> Image.Image:
    """Return an image of any mode in RGB; raise ValueError for pixels of no known range."""
    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers of no known range")
    if image.mode.startswith("I"):
        # 16-bit grey: a plain conversion would clip everything above 255 to white.
        return Image.fromarray((np.asarray(image) / 257).round().astype(np.uint8)).convert("RGB")
    if "transparency" in image.info:
        # A palette with several transparent entries converts to RGB only with a warning.
        image = image.convert("RGBA")
    return image.convert("RGB")
