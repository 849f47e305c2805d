from __future__ import annotations

import numpy as np
import pytest
import torch

from atas.data import from_arrays
from atas.errors import DataError, UsageError

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 3, 8, 6), np.uint8)
LABELS = np.array([0, 2, 1, 0])


def images_of(array):
    return from_arrays("mine", array, LABELS, array, LABELS).train.images


@pytest.mark.parametrize(
    "array",
    [
        PIXELS,
        PIXELS.transpose(0, 2, 3, 1),
        torch.from_numpy(PIXELS),
        torch.from_numpy(PIXELS).permute(0, 2, 3, 1),
        PIXELS / 255,
        (PIXELS / 255).astype(">f4"),
        (PIXELS / 255).astype(np.float16),
        torch.from_numpy(PIXELS).float().requires_grad_() / 255,
    ],
    ids=["nchw", "nhwc", "tensor", "nhwc tensor", "float64", "big-endian", "float16", "with gradient"],
)
def test_every_form_gives_the_same_pixels(array):
    images = images_of(array)
    assert images.is_contiguous()
    assert torch.equal(images, torch.from_numpy(PIXELS))


def test_every_grey_level_survives_the_way_through_floats():
    levels = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
    for kind in (np.float16, np.float32, np.float64):
        floats = (levels / 255).astype(kind)
        data = from_arrays("levels", floats, [0], floats, [0])
        assert np.array_equal(data.train.images.numpy(), levels)


def test_read_only_and_reversed_arrays_are_taken():
    frozen = PIXELS.copy()
    frozen.flags.writeable = False
    assert np.array_equal(images_of(frozen).numpy(), PIXELS)
    assert np.array_equal(images_of(PIXELS[..., ::-1]).numpy(), PIXELS[..., ::-1])


def test_uint8_images_are_not_copied():
    own = PIXELS.copy()
    assert np.shares_memory(images_of(own).numpy(), own)


def test_classes_are_numbered_over_both_splits_or_named():
    data = from_arrays("mine", PIXELS, [0, 1, 0, 1], PIXELS, [0, 0, 3, 0])
    assert data.test.classes == ("0", "1", "2", "3")
    named = from_arrays("mine", PIXELS, LABELS, PIXELS, LABELS, classes=["a", "b", "c"])
    assert named.train.classes == ("a", "b", "c")
    with pytest.raises(DataError, match="labels run from 0 to 2"):
        from_arrays("mine", PIXELS, LABELS, PIXELS, LABELS, classes=["a", "b"])


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.uint16, np.int32, np.int64])
def test_labels_of_any_integer_type(kind):
    data = from_arrays("mine", PIXELS, LABELS.astype(kind), PIXELS, torch.from_numpy(LABELS))
    assert data.train.labels.dtype == torch.int64
    assert data.train.labels.tolist() == LABELS.tolist()


def with_value(value):
    array = PIXELS / 255
    array[1, 2, 3, 4] = value
    return array


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (with_value(np.nan), "training images contain NaN.*undo a normalisation"),
        (with_value(np.inf), "training images contain infinite values"),
        (with_value(-np.inf), "training images contain infinite values"),
        (PIXELS.astype(float), "run from 0 to 255.*divide by 255"),
        (with_value(-0.5), r"run from -0.5 to 1, expected \[0, 1\].*undo the normalisation"),
        (PIXELS.astype(np.int64), "are int64, expected uint8"),
        (PIXELS > 100, "are bool, expected uint8"),
        (PIXELS[:, 0], r"shape \(4, 8, 6\).*axis of length 1"),
        (PIXELS[:, :, :, :3], "either the second or the last axis"),
        (PIXELS[:, [0, 1]], "neither the second nor the last axis.*channels=.first."),
        (np.array(["a.png"]), "is not numeric"),
    ],
)
def test_bad_images(array, message):
    with pytest.raises(DataError, match=message):
        from_arrays("mine", array, LABELS, PIXELS, LABELS)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.eye(4, dtype=int), "argmax"),
        (LABELS.astype(float), "training labels are float64"),
        (LABELS > 0, "training labels are bool"),
        (LABELS - 1, "labels run from -1"),
        (LABELS[:3], "4 images but 3 labels"),
        ([0, 1, 2, 3 * 10**9], "the largest label is 3000000000, .*check the labels"),
    ],
)
def test_bad_labels(labels, message):
    with pytest.raises(DataError, match=message):
        from_arrays("mine", PIXELS, labels, PIXELS, LABELS)


def test_labels_that_count_from_one_are_seen():
    with pytest.raises(DataError, match=r"training labels begin at 1, .* subtract 1 from all labels"):
        from_arrays("mine", PIXELS, LABELS + 1, PIXELS, LABELS + 1)
    assert from_arrays("mine", PIXELS, LABELS + 1, PIXELS, LABELS, classes=list("abcd")).num_classes == 4


def test_empty_arrays():
    with pytest.raises(DataError, match=r"the training set: .* have no pixels"):
        from_arrays("mine", PIXELS[:0].astype(float), LABELS[:0], PIXELS[:0], LABELS[:0])
    with pytest.raises(DataError, match=r"the test set: .* have no pixels"):
        from_arrays("mine", PIXELS, LABELS, PIXELS[:0], LABELS[:0])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 12])
@pytest.mark.parametrize("channels", ["first", "last"])
def test_any_number_of_channels(count, channels):
    pixels = np.random.default_rng(0).integers(0, 256, (4, count, 3, 3), dtype=np.uint8)
    given = pixels if channels == "first" else pixels.transpose(0, 2, 3, 1)
    data = from_arrays("mine", given, LABELS, given, LABELS, channels=channels)
    assert data.shape == (count, 3, 3)
    assert np.array_equal(data.train.images.numpy(), pixels)
    assert data.train.images.stride() == torch.empty(pixels.shape).stride()


def test_an_unknown_place_of_the_channels():
    with pytest.raises(UsageError, match=r"channels must be 'first'.*got 'middle'"):
        from_arrays("mine", PIXELS, LABELS, PIXELS, LABELS, channels="middle")
