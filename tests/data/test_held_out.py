"""Data without test images: some of the training images are held out in their place."""

import numpy as np
import pytest
import torch
from helpers.images import noise_image

from atas import data, recipes
from atas.data import hold_out, stratified_rows
from atas.errors import DataError, MissingTestImagesError, UsageError
from atas.training.data import load_data


@pytest.fixture
def flat(tmp_path):
    """A folder of 12 cats and 6 dogs, without splits."""
    for name, count in (("cat", 12), ("dog", 6)):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(count):
            noise_image(10, 12, seed=number).save(tmp_path / "pets" / name / f"{number}.png")
    return tmp_path / "pets"


def test_rows_are_of_each_class_by_its_share():
    labels = torch.tensor([0] * 60 + [1] * 30 + [2] * 10)
    rows = stratified_rows(labels, 20)
    assert labels[rows].bincount().tolist() == [12, 6, 2]
    assert torch.equal(rows, rows.sort().values)
    assert len(set(rows.tolist())) == 20
    assert torch.equal(rows, stratified_rows(labels, 20))
    assert not torch.equal(rows, stratified_rows(labels, 20, seed=1))
    assert torch.equal(stratified_rows(labels, 100), torch.arange(100))


def test_nothing_is_in_both_splits():
    train = data.Split(torch.arange(40, dtype=torch.uint8).view(40, 1, 1, 1), torch.arange(40) % 4, tuple("abcd"))
    rest, test = hold_out(train, 8, seed=3)
    assert sorted([*rest.images.flatten().tolist(), *test.images.flatten().tolist()]) == list(range(40))
    for count in (0, 40):
        with pytest.raises(DataError, match=f"cannot hold out {count} of 40"):
            hold_out(train, count)


@pytest.mark.parametrize("inside_train", [False, True])
@pytest.mark.parametrize("lazy", [False, True])
def test_folders(flat, lazy, inside_train):
    if inside_train:
        (flat.parent / "split").mkdir()
        flat.rename(flat.parent / "split" / "train")
        flat = flat.parent / "split"
    with pytest.raises(MissingTestImagesError):
        data.load(str(flat), size=8)
    loaded = data.load(str(flat), size=8, held_out=6, lazy=lazy)
    assert (len(loaded.train), len(loaded.test)) == (12, 6)
    assert loaded.test.labels.bincount().tolist() == [4, 2]
    files = {image.numpy().tobytes() for image in (*loaded.train.images[:], *loaded.test.images[:])}
    assert len(files) == 12  # the same twelve noise images, six of them in both classes
    again = data.load(str(flat), size=8, held_out=6, lazy=True)
    assert set(again.train.fingerprints()) & set(loaded.train.fingerprints())
    other = data.load(str(flat), size=8, held_out=6, seed=1)
    assert not torch.equal(other.test.images[:], loaded.test.images[:])


def test_damaged_images_are_skipped(flat):
    (flat / "dog" / "0.png").write_bytes(b"\x89PNG damaged")
    loaded = data.load(str(flat), size=8, held_out=2, skip_damaged=True)
    assert len(loaded.train) + len(loaded.test) == 17
    assert len(loaded.skipped) == 1


@pytest.mark.parametrize("names", [("x_train", "y_train"), ("images", "labels")])
def test_array_files(tmp_path, names):
    images, labels = np.random.default_rng(0).integers(256, size=(20, 8, 8), dtype=np.uint8), np.arange(20) % 2
    np.savez(tmp_path / "mine.npz", **{names[0]: images, names[1]: labels, "classes": np.array(["cat", "dog"])})
    with pytest.raises(MissingTestImagesError):
        data.load(str(tmp_path / "mine.npz"))
    loaded = data.load(str(tmp_path / "mine.npz"), held_out=4)
    assert (len(loaded.train), len(loaded.test), loaded.train.classes) == (16, 4, ("cat", "dog"))
    (tmp_path / "npy").mkdir()
    for name, array in zip(names, (images, labels), strict=True):
        np.save(tmp_path / "npy" / f"{name}.npy", array)
    saved = data.load(str(tmp_path / "npy"), held_out=4)
    assert torch.equal(saved.test.images, loaded.test.images)


def test_data_with_test_images_needs_none(flat, tmp_path):
    (flat / "test").mkdir()
    np.savez(tmp_path / "both.npz", x_train=0, y_train=0, x_test=0, y_test=0)
    for name in (str(flat), str(tmp_path / "both.npz"), "digits"):
        with pytest.raises(UsageError, match=r"leave out data\.held_out"):
            data.load(name, held_out=2)


def test_a_recipe_says_how_many(flat):
    recipe = recipes.from_dict({"data": {"name": str(flat), "size": 8, "held_out": 3}}, "pets")
    assert len(load_data(recipe).test) == 3
    other = recipe.with_values({"training.seed": 4})
    assert not torch.equal(load_data(recipe).test.images, load_data(other).test.images)
    with pytest.raises(UsageError, match=r"data\.held_out must be at least 1"):
        recipe.with_values({"data.held_out": 0})
