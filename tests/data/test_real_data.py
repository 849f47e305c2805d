"""The real sets, where the environment variable ATAS_DATA names a folder that has them."""

from __future__ import annotations

import os
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest

from atas import data
from atas.data.cifar import CIFAR10, CIFAR100, locate, read_folder
from atas.errors import DataError

SPECS = pytest.mark.parametrize("spec", [CIFAR10, CIFAR100], ids=lambda spec: spec.name)


def root_of(spec):
    root = os.environ.get("ATAS_DATA")
    if not root:
        pytest.skip("ATAS_DATA names no folder with real data")
    try:
        locate(spec, Path(root))
    except DataError as error:
        pytest.skip(str(error))
    return Path(root)


@SPECS
def test_cifar_has_the_official_content(spec):
    dataset = data.load(spec.name, root_of(spec))
    assert dataset.shape == (3, 32, 32)
    assert (dataset.train.sha256(), dataset.test.sha256()) == (spec.train_sha256, spec.test_sha256)
    for split in (dataset.train, dataset.test):
        assert set(split.labels.bincount().tolist()) == {len(split) // len(spec.classes)}


@SPECS
def test_the_other_layout_goes_by_its_content(spec):
    dataset = data.load(spec.name, root_of(spec))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / spec.python.folder
        folder.mkdir()
        for split, names in ((dataset.train, spec.python.train), (dataset.test, spec.python.test)):
            images, labels = split.images.reshape(len(split), -1).numpy(), split.labels.numpy()
            for name, pixels, numbers in zip(
                names, np.split(images, len(names)), np.split(labels, len(names)), strict=True
            ):
                (folder / name).write_bytes(pickle.dumps({"data": pixels, spec.label_key: numbers.tolist()}, 2))
        again = data.load(spec.name, temporary)
        assert again.train.sha256() == spec.train_sha256
        assert again.test.labels.equal(dataset.test.labels)
        (folder / spec.python.test[0]).write_bytes((folder / spec.python.test[0]).read_bytes()[:-1000])
        with pytest.raises(DataError, match=f"atas data get {spec.name}"):
            read_folder(spec, spec.python, folder)
