"""Data sets of Hugging Face, by a small stand-in for the package `datasets`, and by itself where it is installed."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image as Pictures

from atas import data
from atas.errors import DataError, UsageError

PIXELS = np.random.default_rng(0).integers(0, 256, (9, 8, 8, 3), dtype=np.uint8)
NCHW = torch.from_numpy(PIXELS).permute(0, 3, 1, 2)


class Image:
    def __init__(self, decode=True):
        self.decode = decode


class ClassLabel:
    def __init__(self, names):
        self.names = names


class Value:
    pass


class Split:
    """What the readers use of a split of the package."""

    def __init__(self, features, **columns):
        self.features, self.columns, self.column_names = features, columns, list(columns)

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, item):
        return {name: values[item] for name, values in self.columns.items()}

    def with_format(self, kind):
        assert kind is None
        return self

    def select_columns(self, names):
        return Split({name: self.features[name] for name in names}, **{name: self.columns[name] for name in names})

    def cast_column(self, name, feature):
        assert not feature.decode
        return Split(self.features | {name: feature}, **self.columns)


def encode(pixels):
    content = io.BytesIO()
    Pictures.fromarray(pixels).save(content, "PNG")
    return {"bytes": content.getvalue(), "path": None}


def split(count, **labels):
    """Images and columns of labels, each with three classes."""
    labels = labels or {"label": [number % 3 for number in range(count)]}
    features = {"img": Image()} | {name: ClassLabel(["cat", "dog", "owl"]) for name in labels}
    return Split(features, img=[encode(pixels) for pixels in PIXELS[:count]], **labels)


@pytest.fixture(autouse=True)
def package(monkeypatch):
    """The stand-in for the package; `splits` are what it loads, and `calls` how it was asked."""
    made = SimpleNamespace(Image=Image, splits={"train": split(9), "test": split(6)}, calls=[])

    def load_dataset(path, name=None, **options):
        made.calls.append((path, name, options))
        return made.splits

    made.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", made)
    return made


def test_names_of_the_hub(package, tmp_path):
    loaded = data.load("hf:owner/animals")
    assert torch.equal(loaded.train.images, NCHW)
    assert loaded.train.labels.tolist() == [0, 1, 2] * 3
    assert (loaded.name, loaded.train.classes, len(loaded.test)) == ("animals", ("cat", "dog", "owl"), 6)
    data.load("hf:owner/animals?config=small&revision=v1", tmp_path)
    assert package.calls == [
        ("owner/animals", None, {"revision": None, "cache_dir": None}),
        ("owner/animals", "small", {"revision": "v1", "cache_dir": str(tmp_path)}),
    ]
    assert data.load("hf:owner/animals", size=4).shape == (3, 4, 4)


def test_choices(package):
    two = {"fine": [0, 1, 2, 0, 1, 2], "coarse": [0, 0, 0, 1, 1, 1]}
    package.splits = {"train": split(6, **two), "held-out": split(6, **two)}
    with pytest.raises(DataError, match=r"label columns fine, coarse; choose one, for example hf:o/a\?label=fine\."):
        data.load("hf:o/a")
    with pytest.raises(
        DataError, match=r"splits train, held-out; say which is for testing, .*hf:o/a\?label=fine&test=held-out\."
    ):
        data.load("hf:o/a?label=fine")
    assert data.load("hf:o/a?label=coarse&test=held-out").test.labels.tolist() == two["coarse"]
    for wrong in ("hf:o/a?label=fin", "hf:o/a?labl=fine"):
        with pytest.raises(UsageError, match="did you mean"):
            data.load(wrong)
    with pytest.raises(UsageError, match="hf: needs the name"):
        data.load("hf:")


def test_a_test_split_without_labels_is_not_used(package):
    package.splits = {"train": split(6), "test": split(6, label=[-1] * 6), "validation": split(3)}
    assert len(data.load("hf:o/a").test) == 3


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        (split(3), "hf:o/a has a training split alone; set data.held_out to the number of images"),
        ({"train": split(3)}, "hf:o/a has a training split alone; set data.held_out to the number of images"),
        ({"train": Split({"text": Value()}, text=["a"])}, "no image column that is known as one, only text"),
        ({"train": split(3), "test": split(3, other=[0, 1, 2])}, "say which is for testing"),
        ({"train": split(3), "test": split(3, label=[0, 1, 3])}, "3 classes allow 0 to 2"),
        ({"train": split(3), "test": split(3, label=[0, 1, "x"])}, "label 2 .* is 'x'"),
    ],
)
def test_unusable_splits(package, splits, message):
    package.splits = splits
    with pytest.raises(DataError, match=message):
        data.load("hf:o/a")


@pytest.mark.parametrize("splits", [split(9), {"train": split(9)}])
def test_held_out(package, splits):
    package.splits = splits
    loaded = data.load("hf:o/a", held_out=3, seed=1)
    assert (len(loaded.train), loaded.test.labels.tolist()) == (6, [0, 1, 2])
    package.splits = {"train": split(9), "test": split(3)}
    with pytest.raises(UsageError, match=r"hf:o/a has test images of its own; leave out data\.held_out"):
        data.load("hf:o/a", held_out=3)


def test_streams_and_transforms():
    stream = split(3)
    stream.__class__ = type("Stream", (Split,), {"__len__": property(lambda _: None.length)})
    transformed = split(3)
    transformed.format = {"type": "custom"}
    for wrong, message in ((stream, "not a stream"), (transformed, "has a transform, which would not be applied")):
        with pytest.raises(DataError, match=message):
            data.as_dataset({"train": wrong, "test": split(3)})
    with pytest.raises(DataError, match="the dict has a training split alone; pass a test split as well"):
        data.as_dataset({"train": split(3)})


@pytest.mark.parametrize("image", [b"no image", b"", b"%!PS-Adobe-3.0 EPSF-3.0\n"])
def test_images_are_opened_as_all_others(package, image):
    package.splits["train"].columns["img"][1] = {"bytes": image, "path": None}
    with pytest.raises(DataError, match=r"image 1 of hf:o/a cannot be decoded"):
        data.load("hf:o/a")


def test_arrays_as_images():
    rows = Split({"image": Value(), "label": Value()}, image=PIXELS[..., 0].tolist(), label=[0, 1, 2] * 3)
    loaded = data.as_dataset((rows, rows), "grey")
    assert torch.equal(loaded.train.images[:, 0], torch.from_numpy(PIXELS[..., 0]))
    assert torch.equal(data.as_dataset({"train": split(9), "test": split(3)}).train.images, NCHW)


def test_errors_of_the_hub(package, monkeypatch):
    def fail(*args, **options):
        raise ConnectionError("cannot reach the hub\nsecond line")

    monkeypatch.setattr(package, "load_dataset", fail)
    with pytest.raises(
        DataError, match=r"cannot load o/a from the Hugging Face hub: ConnectionError: cannot reach the hub$"
    ):
        data.load("hf:o/a")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=r"pip install 'atas\[huggingface\]'"):
        data.load("hf:o/a")


@pytest.mark.slow
def test_the_package_itself(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "datasets")
    package = pytest.importorskip("datasets")
    features = package.Features(img=package.Image(), label=package.ClassLabel(names=["cat", "dog", "owl"]))
    columns = {"img": [Pictures.fromarray(pixels) for pixels in PIXELS], "label": [0, 1, 2] * 3}
    whole = package.Dataset.from_dict(columns, features=features)
    both = package.DatasetDict(train=whole, test=whole.select([8, 1]))
    assert torch.equal(data.as_dataset(both).train.images, NCHW)
    both.save_to_disk(str(tmp_path / "animals"))
    for name in (str(tmp_path / "animals"), f"hf:{tmp_path / 'animals'}?label=label"):
        loaded = data.load(name)
        assert (loaded.name, loaded.train.classes) == ("animals", ("cat", "dog", "owl"))
        assert torch.equal(loaded.test.images, NCHW[[8, 1]])
    (tmp_path / "animals" / "train" / "state.json").write_text("{")
    with pytest.raises(DataError, match="cannot read the data set in"):
        data.load(str(tmp_path / "animals"))
