"""Scikit-learn's handwritten digits: small real images without a download."""

from __future__ import annotations

import numpy as np
import torch

from atas.data.dataset import Dataset, Split
from atas.errors import UsageError

TRAIN = 1297


def read_digits() -> Dataset:
    """Read 1,797 grey images of 8 x 8 pixels: the first 1,297 for training, the last 500 for testing."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError("the digits need scikit-learn; install it with: pip install 'atas[digits]'") from error
    digits = load_digits()
    # The original values are 0..16.
    images = torch.from_numpy(np.rint(digits.images * 255 / 16).astype(np.uint8)).unsqueeze(1)
    labels = torch.from_numpy(digits.target.astype(np.int64))
    classes = tuple(str(digit) for digit in range(10))
    return Dataset(
        "digits",
        Split(images[:TRAIN], labels[:TRAIN], classes),
        Split(images[TRAIN:], labels[TRAIN:], classes),
    )
