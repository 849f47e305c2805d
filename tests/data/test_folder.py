from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.images import noise_image
from PIL import Image

from atas import data
from atas.errors import DataError, UsageError

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def save(path: Path, image: Image.Image | tuple[int, int, int], **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(image, tuple):
        image = Image.new("RGB", (12, 10), image)
    image.save(path, **options)
    return path


@pytest.fixture
def root(tmp_path):
    """Two classes, with two images for training and one for testing each."""
    for half, count in (("train", 2), ("test", 1)):
        for name, colour in (("green", GREEN), ("blue", BLUE)):
            for number in range(count):
                save(tmp_path / half / name / f"{number}.png", colour)
    return tmp_path


def only_image(root: Path, image: Image.Image, name: str = "x.png", size: int = 8, **options: object) -> np.ndarray:
    for half in ("train", "test"):
        save(root / half / "a" / name, image, **options)
    return data.load("imagefolder", root, size=size).train.images[0].numpy()


def test_reads_classes_in_the_order_of_their_names(root):
    dataset = data.load("imagefolder", root, size=8)
    assert dataset.train.classes == ("blue", "green")
    assert dataset.train.labels.tolist() == [0, 0, 1, 1]
    assert dataset.test.labels.tolist() == [0, 1]
    assert dataset.shape == (3, 8, 8)
    assert dataset.train.images.dtype == torch.uint8
    assert dataset.train.images[0, :, 0, 0].tolist() == list(BLUE)
    assert dataset.test.images[1, :, 7, 7].tolist() == list(GREEN)


def test_training_images_can_be_left_in_their_files(root):
    whole, told = data.load("imagefolder", root, size=8), []
    found = data.load("imagefolder", root, size=8, lazy="train", progress=lambda *how: told.append(how))
    assert told[-1] == ("decoding images", 2, 2)
    assert isinstance(found.train.images, data.LazyImages)
    assert torch.equal(found.test.images, whole.test.images)
    assert torch.equal(found.train.images[:], whole.train.images)
    assert found.test.fingerprint() == whole.test.fingerprint()


def test_many_images_keep_their_order(tmp_path):
    for half in ("train", "test"):
        for number in range(150):
            save(tmp_path / half / "a" / f"{number:03}.png", (number, 0, 0))
    told = []
    images = data.load("imagefolder", tmp_path, size=1, progress=lambda *how: told.append(how)).train.images
    assert images[:, 0, 0, 0].tolist() == list(range(150))
    assert told == [("decoding images", done, 300) for done in (0, 64, 128, 192, 256, 300)]


def test_val_serves_as_test_and_size_has_a_default(root):
    (root / "test").rename(root / "val")
    dataset = data.load("imagefolder", str(root))
    assert dataset.shape == (3, 224, 224)
    assert len(dataset.test) == 2


def test_every_file_type_is_read_and_others_are_left(tmp_path):
    for half in ("train", "test"):
        for name in ("a.png", "b.JPEG", "c.jpg", "d.bmp", "e.WebP"):
            save(tmp_path / half / "a" / name, RED)
        (tmp_path / half / "a" / "notes.txt").write_text("no image")
        (tmp_path / half / "a" / "._a.png").write_text("no image either")
        (tmp_path / half / ".cache").mkdir()
    dataset = data.load("imagefolder", tmp_path, size=8)
    assert len(dataset.train) == 5
    assert dataset.train.classes == ("a",)


def test_short_side_is_resized_and_the_centre_kept(tmp_path):
    # A wide image: the middle third is white, the rest black.
    picture = np.zeros((20, 60, 3), np.uint8)
    picture[:, 20:40] = 255
    assert np.all(only_image(tmp_path, Image.fromarray(picture), size=20) == 255)
    assert np.all(only_image(tmp_path, Image.fromarray(picture.transpose(1, 0, 2).copy()), size=20) == 255)


def test_reduction_does_not_alias(tmp_path):
    stripes = np.zeros((64, 64), np.uint8)
    stripes[:, ::2] = 255
    reduced = only_image(tmp_path, Image.fromarray(stripes), size=8)
    assert reduced.min() > 120
    assert reduced.max() < 135


@pytest.mark.parametrize("mode", ["L", "LA", "1", "P", "RGBA", "CMYK"])
def test_any_mode_becomes_rgb(tmp_path, mode):
    image = Image.new("RGB", (8, 8), "white").convert(mode)
    name = "x.jpg" if mode == "CMYK" else "x.png"
    assert np.all(only_image(tmp_path, image, name) == 255)


def test_grey_is_the_same_in_all_channels(tmp_path):
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8)
    assert np.array_equal(only_image(tmp_path, Image.fromarray(grey)), np.stack([grey] * 3))


def test_sixteen_bit_grey_is_scaled_not_clipped(tmp_path):
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    deep = Image.fromarray(grey.astype(np.uint16) * 257)
    assert np.array_equal(only_image(tmp_path, deep)[0], grey)


def test_palette_with_transparency(tmp_path):
    image = Image.new("P", (8, 8), 1)
    image.putpalette([*RED, *GREEN])
    pixels = only_image(tmp_path, image, transparency=bytes([0, 128]))
    assert pixels[:, 0, 0].tolist() == list(GREEN)


def test_exif_rotation_is_applied(tmp_path):
    picture = np.zeros((8, 8, 3), np.uint8)
    picture[:4] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter clockwise: the top goes to the right
    pixels = only_image(tmp_path, Image.fromarray(picture), exif=exif)
    assert np.all(pixels[:, :, 4:] == 255)
    assert np.all(pixels[:, :, :4] == 0)


def test_all_undecodable_images_are_counted_and_the_first_named(root):
    whole = save(root / "train" / "blue" / "whole.jpg", noise_image(64, 64)).read_bytes()
    (root / "train" / "blue" / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    for number in range(6):
        (root / "test" / "green" / f"bad{number}.png").write_text("no image")
    with pytest.raises(DataError) as caught:
        data.load("imagefolder", root, size=8)
    message = str(caught.value)
    assert "7 images of 14 cannot be decoded" in message
    assert "cut.jpg" in message
    assert "bad3.png (cannot identify image file)" in message
    assert "bad4.png" not in message
    assert "and 2 more" in message


def test_empty_class_folder(root):
    (root / "train" / "empty").mkdir()
    with pytest.raises(DataError, match=rf"no images .* in {root / 'train' / 'empty'};"):
        data.load("imagefolder", root, size=8)


def test_images_in_deeper_folders_are_named(root):
    (root / "train" / "blue" / "notes").mkdir()
    (root / "train" / "blue" / "notes" / "about.txt").touch()
    save(root / "train" / "blue" / ".cache" / "0.png", RED)
    before = data.load("imagefolder", root, size=8)
    assert len(before.train) == len(list((root / "train").glob("*/*.*g")))
    for kind in ("deep", "deeper/images"):
        save(root / "test" / "blue" / kind / "0.png", RED)
    with pytest.raises(DataError, match=r"contain folders with images: .*blue/deep, .*blue/deeper; move"):
        data.load("imagefolder", root, size=8)


def test_links_that_lead_nowhere_are_named(root):
    outside = save(root / "elsewhere" / "0.png", RED)
    link = root / "train" / "blue" / "link.png"
    link.symlink_to(outside)
    found = len(data.load("imagefolder", root, size=8).train)
    outside.unlink()
    with pytest.raises(DataError, match=rf"links to images are broken: {link}; repair or remove"):
        data.load("imagefolder", root, size=8)
    link.unlink()
    assert len(data.load("imagefolder", root, size=8).train) == found - 1


def test_many_different_classes_are_not_all_listed(root):
    for number in range(30):
        save(root / "train" / f"extra{number:02}" / "0.png", RED)
    with pytest.raises(DataError, match=r"only in .*train: extra00, .*extra04 and 25 more\); make the same"):
        data.load("imagefolder", root, size=8)


def test_different_classes(root):
    save(root / "train" / "extra" / "0.png", RED)
    (root / "test" / "blue").rename(root / "test" / "navy")
    with pytest.raises(DataError, match=r"only in .*train: blue, extra; only in .*test: navy"):
        data.load("imagefolder", root, size=8)


def test_no_class_folders(root):
    (root / "flat" / "train").mkdir(parents=True)
    (root / "flat" / "test").mkdir()
    with pytest.raises(DataError, match="has no class folders"):
        data.load("imagefolder", root / "flat")


@pytest.mark.parametrize("folder", ["test", "alone"])
def test_a_single_split_is_for_evaluation(root, folder):
    """Class folders alone, or in test/ without train/."""
    expected = data.load(str(root), size=8).test
    shutil.rmtree(root / "train")
    path = root / "test" if folder == "alone" else root
    loaded = data.load(str(path), size=8, lazy="train", test_only=True)
    assert torch.equal(loaded.test.images, expected.images)
    assert (loaded.test.labels.tolist(), loaded.test.classes) == (expected.labels.tolist(), expected.classes)
    with pytest.raises(DataError, match="there is no folder train"):
        data.load(str(path), size=8)


def test_missing_halves(root, tmp_path, monkeypatch):
    (root / "test").rename(root / "exam")
    with pytest.raises(DataError, match="neither a folder test nor val"):
        data.load("imagefolder", root)
    with pytest.raises(DataError, match=f"no folder train in {root / 'exam'};.*as root, or train with data.held_out"):
        data.load("imagefolder", root / "exam")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATAS_DATA", raising=False)
    with pytest.raises(DataError, match=r"the default, as no root was given\); pass the folder .* as root"):
        data.load("imagefolder")


def test_size_below_one(root):
    with pytest.raises(UsageError, match="size is 0"):
        data.load("imagefolder", root, size=0)


def test_size_beyond_memory(root):
    with pytest.raises(UsageError, match=r"size is 10000000, .* takes 300,000 GB, too much .*pass a smaller size"):
        data.load("imagefolder", root, size=10_000_000)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "are not regular files: .*odd.png; remove them"),
        (lambda path: path.symlink_to("/dev/zero"), "are not regular files: .*odd.png; remove them"),
        (lambda path: path.symlink_to(path.name), "links to images are broken: .*odd.png; repair or remove them"),
        (lambda path: path.write_bytes(b""), r"cannot be decoded: .*odd.png \(the file is empty\)"),
    ],
)
def test_what_has_only_the_name_of_an_image(root, make, message):
    make(root / "train" / "blue" / "odd.png")
    with pytest.raises(DataError, match=message):
        data.load("imagefolder", root, size=8)


def test_a_class_folder_that_links_to_itself(root):
    (root / "train" / "loop").symlink_to("loop")
    with pytest.raises(DataError, match=r"links to folders are broken: .*loop; repair or remove them"):
        data.load("imagefolder", root, size=8)
