from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from atas.data import Dataset, Split
from atas.errors import DataError

IMAGES = torch.arange(3 * 1 * 2 * 2, dtype=torch.uint8).reshape(3, 1, 2, 2)
LABELS = torch.tensor([0, 1, 1])
CLASSES = ("cat", "dog")


def test_items_are_float_images_and_plain_labels():
    split = Split(torch.full((2, 3, 4, 4), 255, dtype=torch.uint8), torch.tensor([1, 0]), CLASSES)
    image, label = split[0]
    assert image.dtype == torch.float32
    assert image.shape == (3, 4, 4)
    assert float(image.min()) == 1.0
    assert label == 1
    assert type(label) is int
    assert [label for _, label in split] == [1, 0]


def test_split_is_a_map_style_dataset():
    x, y = next(iter(DataLoader(Split(IMAGES, LABELS, CLASSES), batch_size=3)))
    assert torch.equal(x, IMAGES.float() / 255)
    assert torch.equal(y, LABELS)


def test_split_and_dataset_are_frozen():
    split = Split(IMAGES, LABELS, CLASSES)
    with pytest.raises(dataclasses.FrozenInstanceError):
        split.images = IMAGES  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Dataset("some", split, split).name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (IMAGES.float(), LABELS, "images are float32, expected uint8"),
        (IMAGES[:, 0], LABELS, r"images have the shape \(3, 2, 2\), expected four axes"),
        (IMAGES, LABELS[:2], "3 images but 2 labels"),
        (IMAGES, LABELS.int(), "labels are int32"),
        (IMAGES, LABELS.float(), "labels are float32"),
        (IMAGES, torch.eye(3, dtype=torch.int64), r"labels are int64 of the shape \(3, 3\)"),
        (IMAGES, torch.tensor([0, 1, 2]), "labels run from 0 to 2, but 2 classes allow 0 to 1"),
        (IMAGES, torch.tensor([0, -1, 1]), "labels run from -1 to 1"),
        (IMAGES[:0], LABELS[:0], "have no pixels"),
        (IMAGES[:, :, :0], LABELS, "have no pixels"),
    ],
)
def test_bad_split_is_one_sentence(images, labels, message):
    with pytest.raises(DataError, match=message) as caught:
        Split(images, labels, CLASSES)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


def test_dataset_tells_shape_and_classes():
    data = Dataset("some", Split(IMAGES, LABELS, CLASSES), Split(IMAGES[:1], LABELS[:1], CLASSES))
    assert data.shape == (1, 2, 2)
    assert data.num_classes == 2


def test_repr_of_a_dataset_is_one_line():
    split = Split(IMAGES, LABELS, CLASSES)
    assert repr(split) == "Split(3 images of 1 x 2 x 2, 2 classes)"
    assert repr(Dataset("mine", split, split.subset(slice(2)))) == (
        "Dataset('mine', 3 training and 2 test images of 1 x 2 x 2, 2 classes)"
    )


def test_splits_must_fit_each_other():
    train = Split(IMAGES, LABELS, CLASSES)
    with pytest.raises(DataError, match="bring both to one shape"):
        Dataset("some", train, Split(IMAGES.reshape(3, 1, 1, 4), LABELS, CLASSES))
    with pytest.raises(DataError, match="different classes"):
        Dataset("some", train, Split(IMAGES, LABELS, ("dog", "cat")))


def test_hash_covers_pixels_and_labels():
    expected = hashlib.sha256(IMAGES.numpy().tobytes() + bytes([0, 1, 1])).hexdigest()
    assert Split(IMAGES, LABELS, CLASSES).sha256() == expected
    strided = IMAGES.repeat_interleave(2, dim=0)[::2]
    assert Split(strided, LABELS, CLASSES).sha256() == expected
    assert Split(IMAGES, LABELS.flip(0), CLASSES).sha256() != expected


def test_hash_of_many_classes_tells_labels_apart_that_share_a_byte():
    many = tuple(map(str, range(300)))
    first, second = (Split(IMAGES, torch.tensor([label, 0, 0]), many).sha256() for label in (1, 257))
    assert first != second
    assert first == hashlib.sha256(IMAGES.numpy().tobytes() + np.array([1, 0, 0], "<i8").tobytes()).hexdigest()
