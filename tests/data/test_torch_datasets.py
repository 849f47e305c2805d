from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Subset, TensorDataset

from atas import data
from atas.errors import DataError, UsageError

PIXELS = np.random.default_rng(0).integers(0, 256, (12, 8, 6, 3), dtype=np.uint8)
LABELS = [number % 3 for number in range(12)]
NCHW = torch.from_numpy(PIXELS).permute(0, 3, 1, 2)


class Pairs(list):
    """As torchvision's datasets: a transform, and names of classes."""

    classes = ["cat", "dog", "owl"]  # noqa: RUF012

    def __init__(self, images, labels=LABELS, transform=lambda image: image):
        super().__init__(zip(images, labels, strict=True))
        self.transform = transform

    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return self.transform(image), label


def pictures(transform=lambda image: image):
    return Pairs([Image.fromarray(image) for image in PIXELS], transform=transform)


@pytest.mark.parametrize(
    "images",
    [
        [Image.fromarray(image) for image in PIXELS],
        list(PIXELS),
        list(PIXELS.transpose(0, 3, 1, 2)),
        list(NCHW),
        list(NCHW.float() / 255),
        list(NCHW.half() / 255),
        list(PIXELS / 255),
    ],
    ids=["pil", "hwc", "chw", "tensor", "float", "half", "float64"],
)
def test_kinds_of_images(images):
    loaded = data.from_datasets(Pairs(images), Pairs(images), "mine")
    assert torch.equal(loaded.train.images, NCHW)
    assert loaded.train.labels.tolist() == LABELS
    assert loaded.train.classes == ("cat", "dog", "owl")
    assert loaded.name == "mine"


def test_classes_of_a_subset_and_without_names():
    subset = Subset(pictures(), [0, 1, 5])
    assert data.from_datasets(subset, subset).train.classes == ("cat", "dog", "owl")
    tensors = TensorDataset(NCHW, torch.tensor(LABELS))
    assert data.from_datasets(tensors, tensors).train.classes == ("0", "1", "2")
    assert data.from_datasets(tensors, tensors, classes=["a", "b", "c"]).train.classes == ("a", "b", "c")


def test_grey_and_coloured_images():
    grey = Image.fromarray(PIXELS[0, ..., 0])
    plain = [(grey, 0), (grey.convert("1"), 1)]
    assert data.from_datasets(plain, plain).shape == (1, 8, 6)
    mixed = [(grey, 0), (Image.fromarray(PIXELS[1]), 1), (grey, 0)]
    loaded = data.from_datasets(mixed, plain)
    assert loaded.shape == (3, 8, 6)
    assert torch.equal(loaded.train.images[2], torch.from_numpy(PIXELS[0, ..., 0]).expand(3, -1, -1))
    assert torch.equal(loaded.train.images[1], NCHW[1])


def test_images_of_many_sizes():
    sizes = [(Image.new("RGB", (9, 8 + number), (200, 0, 10 * number)), 0) for number in range(3)]
    with pytest.raises(
        DataError, match=r"image 1 of the training set of dataset is 9 x 9 pixels, and the first is 8 x"
    ):
        data.from_datasets(sizes, sizes)
    loaded = data.from_datasets(sizes, sizes, size=4)
    assert loaded.shape == (3, 4, 4)
    assert loaded.train.images[2, :, 0, 0].tolist() == [200, 0, 20]
    arrays = [(np.asarray(image), label) for image, label in sizes]
    assert torch.equal(data.from_datasets(arrays, arrays, size=4).train.images, loaded.train.images)


def flip_at_random(image):
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if torch.rand(()) < 0.5 else image


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (pictures(flip_at_random), "differs when it is read again.*data.pad, data.flip"),
        (Pairs((NCHW.float() / 255 - 0.5) / 0.25), r"pixels of image 0 .* run from .*undo the normalisation"),
        (Pairs(NCHW.float()), r"expected \[0, 1\]; divide by 255"),
        (Pairs(NCHW.float() * torch.nan), "contain NaN"),
        (Pairs(NCHW.long()), "are int64, expected uint8"),
        (Pairs(NCHW[:, :2]), r"has the shape \(2, 8, 6\)"),
        (Pairs(NCHW[:, :, :0]), "has the shape"),
        (Pairs(["a.png"] * 12), "is a str, expected a PIL image"),
        (Pairs(NCHW, [1.5] * 12), "label 0 .* is 1.5, expected one class number"),
        (Pairs(NCHW, [True] * 12), "is True"),
        (Pairs(NCHW, torch.eye(12)), r"of the shape \(12,\)"),
        (Pairs(NCHW, [3] * 12), "3 classes allow 0 to 2"),
        (Pairs(NCHW, [-1] * 12), "labels run from -1"),
        ([], "is empty"),
        ([1, 2], "item 0 .* is int, expected a pair"),
        ([(1, 2, 3)], "is 3 entries"),
        (DataLoader(TensorDataset(NCHW)), r"is a DataLoader; pass the dataset .*loader\.dataset"),
        (iter([]), "map-style dataset, not a stream"),
        (pictures(lambda image: 1 / 0), r"item 0 .* cannot be read: ZeroDivisionError"),
        (Pairs([Image.fromarray(PIXELS[0, ..., 0].astype(np.float32))] * 12), "floating-point"),
    ],
)
def test_bad_datasets(dataset, message):
    torch.manual_seed(0)
    with pytest.raises(DataError, match=message):
        data.from_datasets(dataset, pictures(), "mine")


def test_too_many_images_for_the_memory(monkeypatch):
    monkeypatch.setattr("atas.data.torch_datasets.host_memory", lambda: 3000)
    with pytest.raises(DataError, match=r"more than half of the 3 kB of memory.*atas data pack"):
        data.from_datasets(pictures(), pictures())


def test_what_is_taken_as_data():
    arrays = ((PIXELS, np.array(LABELS)), (PIXELS[:6], torch.tensor(LABELS[:6])))
    for value in (
        (pictures(), pictures()),
        arrays,
        {"x_train": PIXELS, "y_train": LABELS, "x_test": PIXELS, "y_test": LABELS} | {"y_train": np.array(LABELS)},
        [data.from_arrays("a", PIXELS, LABELS, PIXELS, LABELS).train] * 2,
    ):
        if isinstance(value, dict):
            value["y_test"] = np.array(LABELS)
        assert torch.equal(data.as_dataset(value).train.images, NCHW)
    own = data.from_arrays("a", PIXELS, LABELS, PIXELS, LABELS)
    assert data.as_dataset(own) is own
    for wrong in (None, 3, (1, 2), {"a": 1}, (PIXELS, LABELS), ((PIXELS, np.array(LABELS)), iter([]))):
        with pytest.raises(UsageError, match=r"data must be a Dataset, a pair \(train, test\)"):
            data.as_dataset(wrong)
    for wrong in (DataLoader(pictures()), iter([])):
        with pytest.raises(DataError, match=r"pass the dataset that|not a stream"):
            data.as_dataset((pictures(), wrong))


def test_torchvision_is_not_imported():
    data.from_datasets(pictures(), pictures())
    assert "torchvision" not in sys.modules
