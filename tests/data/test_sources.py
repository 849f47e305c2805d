from __future__ import annotations

import numpy as np
import pytest
import torch

from atas import data
from atas.errors import DataError, UsageError

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
MODULE = """
import pathlib
import numpy as np
pathlib.Path("imported").touch()
pixels = np.arange(6 * 8 * 8 * 3, dtype=np.uint8).reshape(6, 8, 8, 3)
labels = np.arange(6) % 2
def arrays():
    return (pixels, labels), (pixels[:2], labels[:2])
def rooted(root):
    return {"x_train": pixels, "y_train": labels, "x_test": pixels, "y_test": labels + len(root)}
def items():
    return list(zip(pixels, labels)), list(zip(pixels, labels))
def wrong():
    return 3
def broken():
    return 1 / 0
number = 5
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "own_data.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "own_data", raising=False)
    return tmp_path


def test_functions(module):
    loaded = data.load("own_data:arrays")
    assert (loaded.name, loaded.shape, len(loaded.train), len(loaded.test)) == ("arrays", (3, 8, 8), 6, 2)
    assert data.load("own_data:rooted", "ab").test.labels.tolist() == [2, 3, 2, 3, 2, 3]
    assert torch.equal(data.load("own_data:items").train.images, loaded.train.images)
    assert data.load("own_data:items", size=4).shape == (3, 4, 4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_data:wrong", "own_data:wrong: data must be a Dataset, a pair"),
        ("own_data:broken", "the function own_data:broken failed: ZeroDivisionError"),
        ("own_data:number", "has no function 'number'"),
        ("own_data:rooted", "the function own_data:rooted failed: TypeError"),
        ("no_such_module:f", "cannot import 'no_such_module' for the data set"),
    ],
)
def test_bad_functions(module, name, message):
    with pytest.raises((UsageError, DataError), match=message):
        data.load(name)
    with pytest.raises(UsageError, match="returns images of 8 x 8 pixels, and size is 5"):
        data.load("own_data:arrays", size=5)


def test_a_function_that_is_not_trusted_is_not_imported(module):
    with pytest.raises(UsageError, match=r"the data set own_data:arrays is not loaded: it is code.*pass --trust"):
        data.load("own_data:arrays", trusted=False)
    assert not (module / "imported").exists()


def test_folders_are_recognised(photos, tmp_path, monkeypatch):
    data.pack(photos, tmp_path / "packed", size=8, workers=1)
    monkeypatch.chdir(tmp_path)
    for name in ("photos", "./photos", str(photos)):
        assert torch.equal(data.load(name, size=8).train.images, data.load("imagefolder", photos, size=8).train.images)
    assert len(data.load("./packed").train) == 21
    (tmp_path / "photos.zip").touch()
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("./none", "there is no none; pass the path of a folder"),
        ("./empty", "holds no data that atas reads; it should have train/<class>/"),
        ("./photos.zip", "unpack it, and pass the folder"),
        ("./own.pt", "there is no own.pt"),
        ("./" + 300 * "x", "there is no xxx"),
        (300 * "x", "unknown data set"),
        ("./a\0b", "cannot have a zero byte"),
        ("photo", r"unknown data set 'photo'.*FOLDER, FILE\.npz, hf:owner/name, package\.module:function"),
    ):
        with pytest.raises((UsageError, DataError), match=message):
            data.load(name)


def test_data_that_has_moved(photos, tmp_path):
    """A recipe keeps the name, and `root` says where the data is now."""
    moved = tmp_path / "elsewhere" / "photos"
    moved.parent.mkdir()
    photos.rename(moved)
    for root in (moved, moved.parent):
        assert data.find_source("old/photos", root).path == moved
    np.savez(tmp_path / "b.npz", x=PIXELS)
    for root in (tmp_path / "b.npz", tmp_path):
        assert data.find_source("old/b.npz", root).path == tmp_path / "b.npz"


@pytest.mark.parametrize(
    ("name", "root", "shown"),
    [
        ("digits", None, "digits"),
        ("imagefolder", "data/my-photos", "my-photos"),
        ("imagefolder", "data/my-photos/", "my-photos"),
        ("imagefolder", None, "imagefolder"),
        ("packed", "packed/photos", "photos"),
        ("cifar10", "data", "cifar10"),
        ("../photos", None, "photos"),
        ("photos", "elsewhere", "photos"),
        ("cells.npz", None, "cells"),
        ("own_data:arrays", None, "own_data:arrays"),
        ("given:noise", None, "noise"),
        ("hf:owner/name?label=fine", None, "owner/name"),
    ],
)
def test_names_for_titles(name, root, shown):
    assert data.display_name(name, root) == shown


def test_the_folder_that_titles_call_a_dot(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert data.display_name("imagefolder", ".") == data.display_name(".") == tmp_path.name
