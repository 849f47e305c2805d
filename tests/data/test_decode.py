"""Every kind of image file against a slow, obvious reference."""

from __future__ import annotations

import os
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import atas
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


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


def test_no_program_is_started_for_an_image(tmp_path, monkeypatch):
    """Pillow hands EPS to Ghostscript, by its content, whatever the name."""
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)
    (tmp_path / "x.png").write_bytes(EPS)
    with pytest.raises(OSError, match="cannot identify"):
        decode(tmp_path / "x.png", 8)
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("kind", ["TGA", "ICO", "PCX", "DDS", "SGI", "JPEG2000", "PDF"])
def test_other_formats_are_not_read_under_the_name_of_an_image(tmp_path, kind):
    try:
        Image.new("RGB", (8, 8)).save(tmp_path / "x.png", kind)
    except (OSError, KeyError):
        pytest.skip(f"this Pillow does not write {kind}")
    with pytest.raises(OSError, match="cannot identify"):
        decode(tmp_path / "x.png", 8)


def png_of(width: int, height: int) -> bytes:
    """A PNG that claims these sides in a hundred bytes."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("limit", ["Pillow's", None])
def test_bombs_are_refused_before_they_are_decoded(tmp_path, monkeypatch, limit):
    if limit is None:
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # as programs do that trust their files
    (tmp_path / "bomb.png").write_bytes(png_of(60_000, 60_000))
    with pytest.raises(ValueError, match=r"^it is 60000 x 60000 pixels, more than 178,956,970$|^it has more than 178,"):
        decode(tmp_path / "bomb.png", 8)


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/tty", "fifo", "folder"])
def test_only_regular_files_are_opened(tmp_path, name):
    if name == "fifo":
        os.mkfifo(tmp_path / "x.png")  # opening it would wait for ever
    elif name == "folder":
        (tmp_path / "x.png").mkdir()
    else:
        (tmp_path / "x.png").symlink_to(name)
    with pytest.raises(ValueError, match="it is not a regular file"):
        decode(tmp_path / "x.png", 8)


def test_images_are_opened_in_one_place():
    package = Path(atas.__file__).parent
    files = [path for path in package.rglob("*.py") if "Image.open(" in path.read_text(encoding="utf-8")]
    assert files == [package / "data" / "decode.py"]
