"""Files of an earlier version are read, and what was stopped is gone on with, to the same end.

`make_fixtures.py` wrote them. Bits differ between types of processors, so numbers that are computed anew are compared
to a tolerance; ATAS_FROZEN_EXACT=1 asks for equal bits, on the machine that wrote the files.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import atas

from .make_fixtures import ATTACKS, FIXTURES, PLAN, STOPPED, THREAT, Net, digits, sample

EXACT = os.environ.get("ATAS_FROZEN_EXACT") == "1"
TOLERANCE = {"rtol": 0, "atol": 0} if EXACT else {"rtol": 1e-5, "atol": 1e-5}
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())


@pytest.fixture
def old(tmp_path):
    """A copy of a file or folder of the earlier version."""

    def copy(name):
        place = tmp_path / Path(name).name
        (shutil.copytree if (FIXTURES / name).is_dir() else shutil.copy)(FIXTURES / name, place)
        return place

    return copy


def rows_of(folder):
    """The rows of epochs; another version of PyTorch than the files are of also leaves a row about that."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row.get("event") != "resume"]


@pytest.mark.parametrize("method", STOPPED)
def test_a_stopped_training_ends_as_it_would_have(method, old):
    folder = old(f"stopped-{method}")
    before = rows_of(folder)
    run = atas.train(out=folder, resume=True, model=Net(), data=digits())
    found, expected = run.model.state_dict(), load_file(FIXTURES / f"stopped-{method}.safetensors")
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")
    after = rows_of(folder)
    assert after[: len(before)] == before, "what was written before the stop stays"
    assert [row["epoch"] for row in after] == [0, 1, 2]
    assert [row.pop("checksum", None) is None for row in after] == [index < len(before) for index in range(3)]
    assert all(list(row) == list(before[0]) for row in after)


def test_a_finished_run_is_read(old):
    folder = old("finished")
    run = atas.Run.load(folder)
    assert run.metrics == EXPECTED["finished"]["metrics"]
    assert run.recipe.to_toml() == (folder / "recipe.toml").read_text().split("\n", 1)[1]
    stored = load_file(folder / "model.safetensors")
    found = run.model.state_dict()
    assert sorted(found) == sorted(stored)
    assert all(torch.equal(found[name], tensor) for name, tensor in stored.items())


def test_a_finished_run_is_not_trained_again(old):
    folder = old("finished")
    names = ("metrics.jsonl", "model.safetensors", "checkpoints/last.safetensors")
    before = {name: (folder / name).read_bytes() for name in names}
    atas.train(out=folder, resume=True)
    assert {name: (folder / name).read_bytes() for name in names} == before


@torch.no_grad()
@pytest.mark.parametrize("name", ["export/model.safetensors", "finished"])
def test_a_model_is_loaded(name, old):
    logits = atas.load(old(name))(sample().images[:8].float() / 255)
    torch.testing.assert_close(logits, torch.tensor(EXPECTED["finished"]["logits"]), **TOLERANCE)


def test_an_export_is_written_again(old, tmp_path):
    atas.export.write(old("finished"), "safetensors", tmp_path / "out")
    found, expected = (load_file(place / "model.safetensors") for place in (tmp_path / "out", FIXTURES / "export"))
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert (tmp_path / "out" / "README.md").read_text().splitlines()[0] == "---"


def test_a_result_is_read_and_written_again(old, tmp_path):
    file = old("finished") / "evaluation.json"
    result, expected = atas.Evaluation.load(file), EXPECTED["finished"]
    assert result.accuracy == expected["accuracy"]
    assert {name: verdicts.tolist() for name, verdicts in result.correct.items()} == expected["correct"]
    assert result.queries == expected["queries"]
    result.save(tmp_path / "again.json")
    again = json.loads((tmp_path / "again.json").read_text())
    assert again.pop("checksum")  # earlier versions wrote none
    assert again == json.loads(file.read_text())


@pytest.mark.slow
def test_a_stopped_evaluation_finds_what_it_would_have(old):
    if atas.__version__ != EXPECTED["finished"]["version"]:
        pytest.skip("progress is that of one version alone")
    folder = old("finished")
    file, notes = folder / "evaluation.progress.json", []
    result = atas.evaluate(
        atas.Run.load(folder).model,
        sample(),
        threat=THREAT,
        attacks=ATTACKS,
        progress=lambda status: notes.append(status.note),
        progress_file=file,
    )
    assert f"resuming from {file}" in notes
    expected = EXPECTED["finished"]["correct"]
    assert {name: verdicts.tolist() for name, verdicts in result.correct.items()} == expected


def test_runs_are_compared(old, command):
    status, out, _ = command("compare", old("finished"), "--json")
    assert status == 0
    (row,) = json.loads(out)
    assert row["run"] == "finished"


def test_records_of_a_plan_are_used(old, command):
    folder = old("plan")
    pages = {path.name: path.read_text() for path in folder.glob("table-*")}
    for name in pages:
        (folder / name).unlink()
    status, out, err = command("reproduce", *PLAN, "--no-run", "--out", folder)
    assert status == 0, err
    assert {name: (folder / name).read_text() for name in pages} == pages
    status, out, _ = command("reproduce", *PLAN, "--dry-run", "--json", "--out", folder)
    assert status == 0
    assert [trial["done"] for trial in json.loads(out)] == [True, True]


@pytest.mark.parametrize("form", ["raw", "jpeg"])
def test_a_packed_set_is_read(form, old, command):
    folder = old(f"packed-{form}")
    data = atas.data.load("packed", folder)
    assert data.train.classes == ("a", "b")
    for split, (images, labels) in EXPECTED["packed"][form].items():
        found, expected = getattr(data, split), torch.tensor(images, dtype=torch.uint8)
        assert found.labels.tolist() == labels
        difference = (found.images[:].int() - expected.int()).abs().max()
        assert difference <= (0 if EXACT or form == "raw" else 2), "decoders of JPEG may round otherwise"
    assert command("data", "verify", folder).status == 0
