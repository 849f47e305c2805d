from __future__ import annotations

import io
import os
import zipfile

import numpy as np
import pytest
import torch

from atas import data
from atas.errors import DataError, UsageError

GENERATOR = np.random.default_rng(0)
PIXELS = GENERATOR.integers(0, 256, (12, 8, 6, 3), dtype=np.uint8)
LABELS = np.arange(12) % 3


def save(path, **arrays):
    np.savez(path, **arrays)
    return str(path)


def official(path, x=PIXELS, y=LABELS):
    return save(path, x_train=x, y_train=y, x_test=x[:6], y_test=y[:6])


@pytest.mark.parametrize(
    "names",
    [
        ("x_train", "y_train", "x_test", "y_test"),
        ("X_train", "Y_train", "X_test", "Y_test"),
        ("train_images", "train_labels", "test_images", "test_labels"),
        ("train_images", "train_labels", "val_images", "val_labels"),
        ("images-train", "targets-train", "images-test", "targets-test"),
        ("trainX", "trainY", "validX", "validY"),
    ],
)
def test_common_names(tmp_path, names):
    arrays = dict(zip(names, (PIXELS, LABELS, PIXELS[:6], LABELS[:6]), strict=True))
    loaded = data.load(save(tmp_path / "cells.npz", **arrays))
    assert loaded.name == "cells"
    assert torch.equal(loaded.train.images, torch.from_numpy(PIXELS).permute(0, 3, 1, 2))
    assert loaded.train.labels.tolist() == LABELS.tolist()
    assert (len(loaded.test), loaded.num_classes) == (6, 3)


@pytest.mark.parametrize(
    "images",
    [PIXELS.transpose(0, 3, 1, 2), PIXELS / 255, (PIXELS / 255).astype(np.float32), PIXELS.astype(">f4") / 255],
    ids=["nchw", "float64", "float32", "big-endian"],
)
def test_forms_of_images(tmp_path, images):
    loaded = data.load(official(tmp_path / "a.npz", x=images))
    assert torch.equal(loaded.train.images, torch.from_numpy(PIXELS).permute(0, 3, 1, 2))


def test_grey_images_columns_of_labels_and_class_names(tmp_path):
    """As MedMNIST has them."""
    grey = PIXELS[..., 0]
    arrays = {f"{split}_images": grey for split in ("train", "val", "test")}
    arrays |= {f"{split}_labels": LABELS[:, None] for split in ("train", "val", "test")}
    path = save(
        tmp_path / "med.npz", **(arrays | {"val_labels": LABELS[:, None] * 0}), classes=np.array(["a", "b", "c"])
    )
    loaded = data.load(path)
    assert torch.equal(loaded.test.images[:, 0], torch.from_numpy(grey))
    assert loaded.test.labels.tolist() == LABELS.tolist()  # of test, not of val
    assert loaded.train.classes == ("a", "b", "c")


def test_folder_of_npy_files(tmp_path):
    for name, array in {"x_train": PIXELS, "y_train": LABELS, "x_test": PIXELS[:6], "y_test": LABELS[:6]}.items():
        np.save(tmp_path / f"{name}.npy", array)
    (tmp_path / "readme.txt").touch()
    for name in (str(tmp_path), str(tmp_path / "x_test.npy")):
        loaded = data.load(name)
        assert (len(loaded.train), len(loaded.test), loaded.name) == (12, 6, tmp_path.name)
    (tmp_path / "y_test.npy").unlink()
    with pytest.raises(DataError, match="has x_test but no test labels; name the arrays x_train"):
        data.load(str(tmp_path))


def test_a_single_set_is_for_evaluation_only(tmp_path):
    path = save(tmp_path / "one.npz", X=PIXELS, y=LABELS)
    with pytest.raises(
        DataError,
        match=r"one set of images, .*to train, name the arrays x_train.* or train with data\.held_out",
    ):
        data.load(path)
    assert len(data.load(path, test_only=True).test) == 12
    path = save(tmp_path / "test.npz", x_test=PIXELS, y_test=LABELS)
    with pytest.raises(DataError, match="no training images"):
        data.load(path)
    assert len(data.load(path, test_only=True).test) == 12


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"foo": PIXELS}, r"no training images and labels; name the arrays x_train.*it holds foo"),
        ({"x_train": PIXELS, "y_train": LABELS[:5]}, "12 images but 5 labels"),
        ({"x_train": np.full((12, 8, 6, 3), np.nan)}, "training images contain NaN"),
        ({"x_train": PIXELS.astype(float)}, "run from 0 to 255.*divide by 255"),
        ({"x_train": PIXELS - 0.5}, "undo the normalisation"),
        ({"x_train": PIXELS.reshape(12, -1)}, r"x_train has the shape \(12, 144\); save images as"),
        ({"x_train": PIXELS[:, :3]}, "does not tell where the channels are"),
        ({"x_train": PIXELS[0]}, r"x_train has the shape \(8, 6, 3\)"),
        ({"x_train": PIXELS[:0], "y_train": LABELS[:0]}, "have no pixels"),
        ({"y_train": np.eye(3)[LABELS]}, "argmax"),
        ({"y_train": LABELS + 1}, "begin at 1"),
        ({"y_train": -LABELS}, "labels run from -2"),
        ({"y_train": LABELS.astype(str)}, "y_train holds texts"),
        ({"classes": np.arange(3)}, "class names are int64"),
        ({"classes": np.array(["a", "b"])}, "2 classes allow 0 to 1"),
        (
            {"x_train": np.array([{}, 1], dtype=object)},
            "Python objects, which are not read because they could run code",
        ),
        ({"x_train": np.zeros(12, [("a", "u1")])}, "not numbers"),
        ({"x_test": PIXELS[:6, :4]}, "bring both to one shape"),
    ],
)
def test_bad_arrays(tmp_path, arrays, message):
    good = {"x_train": PIXELS, "y_train": LABELS, "x_test": PIXELS[:6], "y_test": LABELS[:6]}
    path = save(tmp_path / "bad.npz", **(arrays if "foo" in arrays else good | arrays))
    with pytest.raises(DataError, match=message) as error:
        data.load(path)
    assert path in str(error.value)


def npz_with(header: bytes) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("x_train.npy", header)
        archive.writestr("y_train.npy", header)
    return content.getvalue()


def npy_header(text: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no archive",
        b"PK\x03\x04 but no archive",
        b"\x80\x04\x95" + bytes(50),  # a pickle
        npz_with(b""),
        npz_with(b"\x93NUMPY\x01"),
        npz_with(npy_header("{'descr': '|u1', 'fortran_order': False, 'shape': (9, 9, 9)}")),
        npz_with(npy_header("{'descr': '|u1', 'fortran_order': False, 'shape': (99999999999999, 9, 9, 9)}")),
        npz_with(npy_header("{'descr': '|u1', 'fortran_order': False, 'shape': (-1, 9, 9, 9)}")),
        npz_with(npy_header("__import__('os').system('touch ran')")),
        npz_with(npy_header("(" * 5000)),
    ],
)
def test_damaged_files(tmp_path, monkeypatch, content):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "bad.npz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"bad\.npz"):
        data.load(str(path))
    assert not (tmp_path / "ran").exists()


def test_every_cut_is_one_sentence(tmp_path):
    path = tmp_path / "a.npz"
    official(path)
    whole = path.read_bytes()
    for length in range(0, len(whole), len(whole) // 40):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"a\.npz"):
            data.load(str(path))


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(DataError, match=r"no file of np\.savez"):
        data.load(str(tmp_path / "pipe.npz"))
    with pytest.raises(DataError, match="No such file"):
        data.load(str(tmp_path / "none.npz"))
    with pytest.raises(UsageError, match="size is for"):
        data.load(official(tmp_path / "a.npz"), size=4)
