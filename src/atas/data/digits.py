"""Handwritten digits: small real images that are part of the package.

They are the test images of "Optical Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak, UCI Machine
Learning Repository, 1998 (https://doi.org/10.24432/C50P49, CC BY 4.0), which scikit-learn has too.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from atas.data.dataset import Dataset, Split

TRAIN = 1297
_LEVELS = 16  # the largest value


def read_digits() -> Dataset:
    """Read 1,797 grey images of 8 x 8 pixels: the first 1,297 for training, the last 500 for testing."""
    with np.load(Path(__file__).with_suffix(".npz"), allow_pickle=False) as stored:
        values, digits = stored["values"], stored["labels"]
    images = torch.from_numpy(np.rint(values * (255 / _LEVELS)).astype(np.uint8)).unsqueeze(1)
    labels = torch.from_numpy(digits.astype(np.int64))
    classes = tuple(str(digit) for digit in range(10))
    return Dataset(
        "digits",
        Split(images[:TRAIN], labels[:TRAIN], classes),
        Split(images[TRAIN:], labels[TRAIN:], classes),
    )
