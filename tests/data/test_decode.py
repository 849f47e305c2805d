"""Every kind of image file against a slow, obvious reference."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from atas.data.decode import decode, error_text, to_chw


def reference_resize(pixels: np.ndarray, width: int, height: int) -> np.ndarray:
    """A triangle filter as wide as the reduction, first along rows, then along columns."""

    def along(values: np.ndarray, length: int) -> np.ndarray:
        scale = len(values) / length
        support = max(scale, 1.0)
        rows = []
        for target in range(length):
            centre = (target + 0.5) * scale
            weights = np.maximum(0, 1 - np.abs(np.arange(len(values)) + 0.5 - centre) / support)
            rows.append(np.tensordot(weights / weights.sum(), values, 1))
        return np.stack(rows)

    across = np.round(along(pixels.astype(float).transpose(1, 0, 2), width).transpose(1, 0, 2))
    return np.round(along(across, height))


def noise(width: int, height: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 32), st.integers(0, 9))
def test_the_three_fits(tmp_path_factory, width, height, size, seed):
    path = tmp_path_factory.getbasetemp() / "fit.png"
    pixels = noise(width, height, seed)
    Image.fromarray(pixels).save(path)
    squashed = to_chw(decode(path, size, "squash")).transpose(1, 2, 0)
    assert np.abs(squashed - reference_resize(pixels, size, size)).max() <= 2  # it rounds twice
    short = min(width, height)
    new = tuple(max(size, round(side * size / short)) for side in (width, height))
    whole = np.asarray(decode(path, size, "keep")).astype(int)
    assert whole.shape == (new[1], new[0], 3)
    assert np.abs(whole - reference_resize(pixels, *new)).max() <= 2  # it rounds twice
    left, top = (new[0] - size) // 2, (new[1] - size) // 2
    assert np.array_equal(np.asarray(decode(path, size, "crop")), whole[top : top + size, left : left + size])


TURNS = {  # what has to be done to the stored pixels, by the EXIF orientation
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: np.rot90(a),
}


@pytest.mark.parametrize("orientation", TURNS)
@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_exif_orientations(tmp_path, orientation, suffix):
    pixels = np.kron(noise(3, 3, seed=4), np.ones((16, 16, 1), np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"x.{suffix}"
    Image.fromarray(pixels).save(path, exif=exif, **({"quality": 95, "subsampling": 0} if suffix == "jpg" else {}))
    found = np.asarray(decode(path, 48)).astype(int)
    assert np.abs(found - TURNS[orientation](pixels)).max() <= (12 if suffix == "jpg" else 0)


COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "grey": (128, 128, 128)}


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize(
    ("mode", "name"),
    [
        ("RGB", "x.png"),
        ("RGB", "x.jpg"),
        ("RGB", "x.webp"),
        ("RGB", "x.bmp"),
        ("RGB", "x.tif"),
        ("RGB", "x.ppm"),
        ("RGBA", "x.png"),
        ("P", "x.png"),
        ("P", "x.gif"),
        ("CMYK", "x.jpg"),
        ("CMYK", "x.tif"),
    ],
)
def test_colours_survive_every_format(tmp_path, mode, name, colour):
    values = COLOURS[colour]
    image = Image.new("RGB", (20, 16), values)
    image = image.quantize(8) if mode == "P" else image.convert(mode)
    if mode == "RGBA":
        image.putalpha(100)
    image.save(tmp_path / name)
    found = to_chw(decode(tmp_path / name, 8))
    assert found.shape == (3, 8, 8)
    assert np.abs(found.astype(int) - np.array(values)[:, None, None]).max() <= 8  # WebP and JPEG lose some


@pytest.mark.parametrize(("mode", "name"), [("L", "x.png"), ("L", "x.jpg"), ("LA", "x.png"), ("1", "x.png")])
def test_grey_in_all_channels(tmp_path, mode, name):
    ramp = np.repeat(np.arange(0, 256, 16, dtype=np.uint8), 16).reshape(16, 16)
    ramp = np.where(ramp > 127, 255, 0).astype(np.uint8) if mode == "1" else ramp
    Image.fromarray(ramp).convert(mode).save(tmp_path / name)
    found = to_chw(decode(tmp_path / name, 16)).astype(int)
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])
    assert np.abs(found[0] - ramp).max() <= 4


def sixteen_bit_png(pixels: np.ndarray) -> bytes:
    """A PNG with 16 bits a channel in colour, which Pillow reads but does not write."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test_sixteen_bits(tmp_path):
    deep = np.random.default_rng(0).integers(0, 65536, (8, 8, 3), np.uint16)
    (tmp_path / "colour.png").write_bytes(sixteen_bit_png(deep))
    assert np.abs(np.asarray(decode(tmp_path / "colour.png", 8)).astype(int) - deep / 257).max() <= 1
    for name in ("grey.png", "grey.tif", "grey.pgm"):
        Image.fromarray(deep[..., 0]).save(tmp_path / name)
        found = np.asarray(decode(tmp_path / name, 8)).astype(int)
        assert np.abs(found - (deep[..., :1] / 257)).max() <= 0.5


@pytest.mark.slow
def test_a_large_jpeg_is_decoded_at_a_fraction_and_looks_the_same(tmp_path):
    """Smooth, so that what differs is the way of reducing and not the aliasing of noise."""
    y, x = np.mgrid[:800, :1000] / 800
    pixels = np.stack([np.sin(7 * x + 3 * y), np.cos(9 * y), np.sin(11 * x * y)], 2) * 120 + 128
    Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / "x.jpg", quality=95)
    Image.open(tmp_path / "x.jpg").save(tmp_path / "x.png")
    fast, slow = (to_chw(decode(tmp_path / name, 32)).astype(int) for name in ("x.jpg", "x.png"))
    assert np.abs(fast - slow).max() <= 2


def test_image_that_cannot_be_decoded_is_named(tmp_path):
    whole = tmp_path / "whole.jpg"
    Image.fromarray(noise(64, 64)).save(whole)
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "cut.jpg").write_bytes(whole.read_bytes()[:1000])
    (tmp_path / "text.png").write_text("no image")
    Image.fromarray(np.ones((8, 8), np.float32)).save(tmp_path / "float.tif")
    for name, value in (("deep", 70000), ("dark", 200)):  # whatever the values, their range is not known
        Image.fromarray(np.full((8, 8), value, np.int32)).save(tmp_path / f"{name}.tif")
    Image.new("L", (10_000, 1)).save(tmp_path / "line.png")
    expected = {
        "empty.jpg": "the file is empty",
        "cut.jpg": "image file is truncated",
        "text.png": "cannot identify image file",
        "float.tif": "floating-point",
        "deep.tif": "more than 16 bits",
        "dark.tif": "more than 16 bits",
        "gone.png": "No such file or directory",
        "line.png": "it is 10000 x 1 pixels, too narrow for its length",
    }
    for name, words in expected.items():
        with pytest.raises((OSError, ValueError)) as caught:
            decode(tmp_path / name, 8)
        assert words in error_text(caught.value)
        assert str(tmp_path) not in error_text(caught.value)
