"""A model is published by one command: train and judge, publish, load by name; another file is refused."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

import atas
from atas.errors import DataError
from atas.models import published
from atas.sweeps import Plan, PlanProgress, Store, Trial
from atas.training import Run

SCRIPT = Path(__file__).parents[2] / "scripts" / "publish.py"
NAME = "digits-tiny"
RECIPE = """
extends = "digits-small-cnn-atas"
[training]
epochs = 1
probe = 10
loggers = []
[engine]
device = "cpu"
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A small training, judged by FGSM alone."""
    folder = tmp_path_factory.mktemp("publish")
    recipe = folder / f"{NAME}.toml"
    recipe.write_text(RECIPE, encoding="utf-8")
    (folder / "published.json").write_text("{}", encoding="utf-8")
    assert Plan([Trial(str(recipe), attacks=("fgsm",))], Store(folder / "store")).run(PlanProgress()) == []
    return folder


def publish(folder, monkeypatch):
    words = [folder / f"{NAME}.toml", "--store", folder / "store", "--weights", folder / "weights"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, words), "--index", str(folder / "published.json")])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return end.value.code


@pytest.mark.slow
def test_from_a_finished_run_to_a_model_by_name(store, monkeypatch, capsys):
    assert publish(store, monkeypatch) == 1
    assert "has not been judged by autoattack" in capsys.readouterr().err

    trial = Trial(str(store / f"{NAME}.toml"), attacks=("autoattack",))
    assert Plan([trial], Store(store / "store")).run(PlanProgress()) == []
    assert publish(store, monkeypatch) == 0

    entries = json.loads((store / "published.json").read_text(encoding="utf-8"))
    monkeypatch.setattr(published, "published", lambda: entries)
    monkeypatch.setenv("ATAS_WEIGHTS", str(store / "weights"))
    record = Store(store / "store").record(trial)
    robust = f"{100 * record.attacks['autoattack']['accuracy']:.1f}% under AutoAttack"
    assert entries[NAME]["what"].endswith(robust)
    path = store / "weights" / NAME / published.FILE
    assert entries[NAME]["bytes"] == path.stat().st_size

    images = atas.data.load("digits").test.images[:100].float() / 255
    with torch.no_grad():
        logits, rounded = (model(images) for model in (run_of(store, trial).model, atas.load(NAME)))
    torch.testing.assert_close(rounded, logits, rtol=0, atol=1e-2 * float(logits.abs().max()))
    card = (path.parent / "README.md").read_text(encoding="utf-8")
    assert f'atas.load("{NAME}")' in card
    assert robust.partition("%")[0] in card

    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"is not the published {NAME}"):
        atas.load(NAME)


def run_of(store, trial):
    return Run.load(Store(store / "store").training_folder(trial).path)


def test_without_a_training_it_says_what_to_do(tmp_path, store, monkeypatch, capsys):
    (tmp_path / f"{NAME}.toml").write_text(RECIPE, encoding="utf-8")
    assert publish(tmp_path, monkeypatch) == 1
    assert "has no trained model of" in capsys.readouterr().err
