"""`atas train --auto`: a folder of images, Ctrl-C and resume, JSON, and wrong options."""

import json
import signal
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from helpers.images import noise_image

from atas import data
from atas.autotrain import job
from atas.training import TrainingProgress
from atas.training.run import RunFolder

QUICK = ("--minutes", "0.05", "--set", "training.epochs=1")


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """A folder of two classes, one of them darker, without splits."""
    for name, value in (("day", 1.0), ("night", 0.4)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(40):
            image = noise_image(12, 10, seed=number).point(lambda pixel, value=value: int(pixel * value))
            image.save(tmp_path / "photos" / name / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "photos"


@pytest.mark.slow
def test_a_folder_of_images(photos, command):
    done = command("train", "--auto", "photos", "--eps", "4/255", "--out", "run", *QUICK)
    assert done.status == 0, done
    assert "54 training images of 3 x 10 x 10 in 2 classes" in done.out
    assert "26 test images, held out of the training images" in done.out
    assert "Of 26 test images" in done.out
    recipe = RunFolder(photos.parent / "run").recipe.read_text()
    assert 'name = "photos"' in recipe
    assert "held_out = 26" in recipe
    earlier = json.loads((photos.parent / "run" / "evaluation.json").read_text())
    again = command("evaluate", "run", "--attacks", "fgsm,pgd50,autoattack", "--json")
    assert json.loads(again.out)["data"] == earlier["data"]
    for other in (("report", "run"), ("export", "run", "--to", "safetensors"), ("train", "--resume", "--out", "run")):
        assert command(*other).status == 0, other
    sentence = command("train", "--auto", "photos", "--out", "run").sentence("there is a run in run already", status=2)
    assert "--overwrite" in sentence
    assert command("train", "--auto", "photos", "--out", "run", "--overwrite", "-q", *QUICK).status == 0


@pytest.mark.slow
def test_json(photos, command):
    done = command("train", "--auto", "digits", "--eps", "0.1", "--seed", "3", "--json", *QUICK)
    found = json.loads(done.out)
    assert found["folder"] == "runs/digits-small-cnn-auto"
    assert found["epochs"] == 1
    assert found["evaluation"]["n"] >= 100
    assert found["verdict"][-1] == "To see what happened: atas report runs/digits-small-cnn-auto"
    assert len(found["choices"]) == 6
    assert "epoch 1/1" in done.err


@pytest.mark.slow
def test_a_stopped_training_resumes(photos, command, monkeypatch):
    ended = []

    def stop(display, *arguments):
        ended.append(1)
        if len(ended) == 2:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(TrainingProgress, "end_epoch", stop)
        command(
            "train", "--auto", "photos", "--out", "run", "--minutes", "0.05", "--set", "training.epochs=4"
        ).sentence("the run is saved, continue with: atas train --resume --out run", status=1)
    assert command("train", "--resume", "--out", "run").status == 0
    assert RunFolder(photos.parent / "run").model.exists()


def test_wrong_use(photos, command):
    (photos.parent / "empty").mkdir()
    for arguments, parts, status in (
        (("digits-small-cnn-atas", "--auto", "digits"), ["--auto cannot be combined with a recipe"], 2),
        (("--auto", "digits", "--resume"), ["--auto cannot be combined with --resume", "--resume --out FOLDER"], 2),
        (("--auto", "digits", "--seeds", "0,1"), ["--auto cannot be combined with --seeds"], 2),
        (("digits-small-cnn-atas", "--minutes", "3"), ["--minutes is for --auto DATA"], 2),
        (("digits-small-cnn-atas", "--eps", "4/255"), ["--set method.eps=4/255"], 2),
        (("--auto", "digits", "--minutes", "0"), ["minutes must be above zero"], 2),
        (("--auto", "digits", "--eps", "-4/255"), ["eps must be above zero"], 2),
        (("--auto", "digits", "--eps", "x"), ["--eps"], 2),
        (("--auto", "./empty"), ["empty holds no data that atas reads"], 1),
        (("--auto", "digits", "--set", "method.eps=0.1"), ["pass eps"], 2),
    ):
        command("train", *arguments).sentence(*parts, status=status)


def test_several_processes_are_refused(command, monkeypatch):
    monkeypatch.setattr(job, "init", lambda: nullcontext(SimpleNamespace(size=2)))
    command("train", "--auto", "digits").sentence("in one process", "without torchrun", status=2)


def test_data_is_not_read_for_wrong_options(command, monkeypatch):
    monkeypatch.setattr(data, "load", None)
    command("train", "--auto", "digits", "--minutes", "-1").sentence("minutes must be above zero", status=2)
