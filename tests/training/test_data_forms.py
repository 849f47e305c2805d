"""Training on data of any form, and without the damaged images of a folder."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from helpers.images import noise_image
from torch.utils.data import TensorDataset

import atas
from atas import data
from atas.errors import DataError, UsageError
from atas.training.run import RunFolder

PIXELS = np.random.default_rng(0).integers(0, 256, (24, 8, 8, 3), dtype=np.uint8)
LABELS = np.arange(24) % 3
VALUES = {
    "model.name": "small-cnn",
    "training.epochs": 1,
    "training.batch_size": 8,
    "training.probe": 4,
    "training.loggers": [],
    "engine.device": "cpu",
    "method.name": "fgsm",
    "method.eps": 0.1,
}
MODULE = """
import numpy as np
def load():
    with np.load("cells.npz") as file:
        return (file["x_train"], file["y_train"]), (file["x_test"], file["y_test"])
"""
RECIPE = "digits-small-cnn-fgsm"


def train(out, **options):
    values = VALUES | options.pop("values", {})
    return atas.train(RECIPE, out=out, values=values, **options)


@pytest.fixture
def npz(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("cells.npz", x_train=PIXELS, y_train=LABELS, x_test=PIXELS[:8], y_test=LABELS[:8])
    return "cells.npz"


def test_the_same_images_in_any_form_give_the_same_bits(npz, tmp_path, monkeypatch):
    tensors = TensorDataset(torch.from_numpy(PIXELS).permute(0, 3, 1, 2), torch.from_numpy(LABELS))
    (tmp_path / "own_cells.py").write_text(MODULE)
    forms = [
        {"values": {"data.name": npz}},
        {"data": npz},
        {"data": tmp_path / npz},
        {"data": (tensors, tensors)},
        {"data": ((PIXELS, LABELS), (PIXELS[:8], LABELS[:8]))},
        {"values": {"data.name": "own_cells:load"}},
    ]
    runs = [train(f"run-{number}", **form) for number, form in enumerate(forms)]
    weights = [run.model.state_dict() for run in runs]
    for other in weights[1:]:
        assert all(torch.equal(tensor, other[name]) for name, tensor in weights[0].items())
    assert [run.recipe.data.label for run in runs] == [
        "cells",
        "cells",
        "cells",
        "TensorDataset",
        "arrays",
        "own_cells:load",
    ]
    assert [run.recipe.trust_option for run in runs] == ["", "", "", "", "", " --trust"]
    sys.modules.pop("own_cells", None)


def test_wrong_data_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(UsageError, match=r"data must be a Dataset, .* or a name that atas\.data\.load takes; got 3"):
        train(tmp_path / "run", data=3)
    assert not (tmp_path / "run").exists()


def test_a_run_resumes_where_its_data_has_moved(npz, tmp_path):
    train("run", values={"data.name": npz})
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / npz).rename(tmp_path / "elsewhere" / npz)
    with pytest.raises(DataError, match=r"cannot read cells\.npz"):
        atas.train(resume=True, out="run")
    atas.train(resume=True, out="run", values={"data.root": "elsewhere"})


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Two classes of eight training and four test images, two of which are damaged."""
    monkeypatch.chdir(tmp_path)
    for half, count in (("train", 16), ("test", 8)):
        for number in range(count):
            folder = tmp_path / "my-photos" / half / "ab"[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            noise_image(10, 9, seed=number + count).save(folder / f"{number:02}.png")
    (tmp_path / "my-photos" / "train" / "a" / "04.png").write_bytes(b"damaged")
    (tmp_path / "my-photos" / "test" / "b" / "03.png").write_bytes(b"")
    return tmp_path / "my-photos"


FOLDER = {"data.name": "my-photos", "data.size": 8}
SKIP = FOLDER | {"data.skip_damaged": True}


@pytest.mark.parametrize("loading", ["resident", "streaming"])
def test_damaged_images_are_left_out_and_listed(photos, capsys, loading):
    with pytest.raises(DataError, match=r"cannot (be )?decoded?.*--skip-damaged"):
        train("plain", values=FOLDER | {"data.loading": loading})
    run = train("run", values=SKIP | {"data.loading": loading, "data.workers": 1})
    assert "left out 2 damaged images; run/skipped.json lists them" in capsys.readouterr().out
    assert RunFolder(run.folder).read_skipped() == ["test/b/03.png", "train/a/04.png"]
    (photos / "train" / "a" / "04.png").unlink()
    (photos / "test" / "b" / "03.png").unlink()
    without = train("without", values=FOLDER)
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(tensor, without.model.state_dict()[name])


def test_a_resume_leaves_out_the_same_images(photos):
    longer = SKIP | {"training.epochs": 2, "training.checkpoint_every": 0}
    whole = train("whole", values=longer)

    class Stop:
        def due(self, step):
            return step.epoch == 1

        def on_step_end(self, step, engine):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train("run", values=longer, observers=[Stop()])
    noise_image(10, 9, seed=99).save(photos / "train" / "a" / "04.png")  # repaired
    resumed = atas.train(resume=True, out="run")
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name])
    (photos / "train" / "b" / "05.png").write_bytes(b"damaged later")
    with pytest.raises(DataError, match=r"05\.png \(cannot identify image file\)"):
        atas.train(resume=True, out="run")


def test_a_damaged_list_is_one_sentence(photos):
    train("run", values=SKIP)
    for content in ("{", "[]", json.dumps({"skipped": [["a"]]}), json.dumps({"skipped": [["a", 1]]})):
        RunFolder(photos.parent / "run").skipped.write_text(content)
        with pytest.raises(
            DataError, match=r"skipped\.json, the list of damaged images .* start again with --overwrite"
        ):
            atas.train(resume=True, out="run")


def test_only_folders_have_damaged_images_to_skip(npz):
    with pytest.raises(UsageError, match="damaged images can be skipped in folders of image files only"):
        train("run", values={"data.name": npz, "data.skip_damaged": True})


def test_nothing_is_left_of_a_class(photos):
    for path in (photos / "train" / "a").iterdir():
        path.write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"all images of a in my-photos/train are damaged"):
        train("run", values=SKIP)


def test_lists_in_python(photos):
    loaded = data.load("my-photos", size=8, skip_damaged=True)
    assert [name for name, _ in loaded.skipped] == ["test/b/03.png", "train/a/04.png"]
    assert (len(loaded.train), len(loaded.test)) == (15, 7)
    again = data.load("my-photos", size=8, skip_damaged=[name for name, _ in loaded.skipped])
    assert torch.equal(again.train.images, loaded.train.images)
    assert torch.equal(again.test.labels, loaded.test.labels)
    lazy = data.load("my-photos", size=8, skip_damaged=True, lazy=True)
    assert torch.equal(lazy.train.images[:], loaded.train.images)
    assert set(lazy.train.fingerprints()) <= set(loaded.train.fingerprints())


def test_a_class_without_training_images_is_said(npz, command, tmp_path):
    """As where the labels of the test images are counted from 1."""
    np.savez(npz, x_train=PIXELS, y_train=LABELS, x_test=PIXELS[:8], y_test=LABELS[:8] + 1)
    sentence = "no training image has a class of 2 of the 8 test images (3)"
    values = [part for key, value in VALUES.items() for part in ("--set", f"{key}={value}")]
    done = command("train", RECIPE, "--out", "run", "--set", f"data.name={npz}", *values)
    assert done.status == 0, done.err
    for text in (done.out, command("data", "check", npz).out):
        assert sentence in " ".join(text.split())
    assert data.load("digits").gap is None
