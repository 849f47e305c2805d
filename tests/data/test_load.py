from __future__ import annotations

import pytest

from atas import data
from atas.errors import DataError, UsageError

DIGITS_SHA256 = "88abb964e51816f0474d55478f2550fc310f5d649c4cd8133dc1ae62826508f5"


def test_names():
    assert data.names() == [
        "digits",
        "cifar10",
        "cifar100",
        "mnist",
        "fashion-mnist",
        "svhn",
        "tiny-imagenet",
        "imagefolder",
        "packed",
    ]


def test_unknown_name_tells_the_nearest():
    with pytest.raises(UsageError, match=r"unknown data set 'cifar-10'; did you mean 'cifar10'\?"):
        data.load("cifar-10")


@pytest.mark.parametrize("name", ["digits", "cifar10", "cifar100"])
def test_size_is_for_image_folders(name):
    with pytest.raises(UsageError, match="size is for imagefolder"):
        data.load(name, size=32)


def test_digits():
    digits = data.load("digits")
    assert (len(digits.train), len(digits.test)) == (1297, 500)
    assert digits.shape == (1, 8, 8)
    assert digits.train.classes == tuple("0123456789")
    assert digits.train.sha256() == DIGITS_SHA256
    assert set(digits.test.images.unique().tolist()) == {round(255 * value / 16) for value in range(17)}


def test_root_defaults_to_the_environment_then_to_data(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATAS_DATA", str(tmp_path / "elsewhere"))
    with pytest.raises(DataError, match="elsewhere"):
        data.load("cifar10")
    monkeypatch.delenv("ATAS_DATA")
    with pytest.raises(DataError, match=f"no cifar10 in {tmp_path / 'data'}"):
        data.load("cifar10")
    with pytest.raises(DataError, match="given-here"):
        data.load("cifar10", tmp_path / "given-here")
