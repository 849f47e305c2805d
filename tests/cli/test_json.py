"""Every command that prints a table speaks to programs too: with --json, standard output is one JSON document alone."""

import io
import json
import shutil
from contextlib import redirect_stdout

import pytest
import typer
from PIL import Image

from atas import data
from atas.cli import app, demo


def commands(group=None, path=()):
    """All commands by their words."""
    group = group or typer.main.get_command(app)
    found = {}
    for name, command in group.commands.items():
        inner = getattr(command, "commands", None)
        found |= commands(command, (*path, name)) if inner else {" ".join((*path, name)): command}
    return found


NO_TABLE = {"report"}  # writes a page, and only says where
NO_NETWORK = {"data get"}  # tested with the data, where an archive is at hand


@pytest.fixture
def photos(tmp_path):
    """A folder of two images."""
    for half in ("train", "test"):
        (tmp_path / "photos" / half / "red").mkdir(parents=True)
        Image.new("RGB", (8, 8), "red").save(tmp_path / "photos" / half / "red" / "0.png")
    data.pack(tmp_path / "photos", tmp_path / "packed", size=8)
    return tmp_path / "photos"


@pytest.fixture(scope="session")
def network_of_a_demo(finished, tmp_path_factory):
    """A run evaluated as the demo does; not to be changed."""
    folder = shutil.copytree(finished, tmp_path_factory.mktemp("demo") / "run")
    with redirect_stdout(io.StringIO()):
        app(["evaluate", str(folder), "--attacks", ",".join(demo.ATTACKS), "--examples", "2"], standalone_mode=False)
    return folder


@pytest.fixture
def example(finished, copy_of, tiny, photos, network_of_a_demo, tmp_path, monkeypatch):
    """For each command, arguments that make it say something in a moment."""

    def call(job, *_):  # test_demo.py tests its processes, which write nothing to standard output
        shutil.copytree(network_of_a_demo, job.folder, dirs_exist_ok=True)

    monkeypatch.setattr(demo._Job, "_call", call)
    return {
        "demo": ["--out", tmp_path / "demo"],
        "ls": ["methods"],
        "data check": ["digits"],
        "data pack": [photos, tmp_path / "other", "--size", "8"],
        "data verify": [tmp_path / "packed"],
        "train": [tiny, "--out", tmp_path / "run", "--evaluate"],
        "evaluate": [copy_of(), "--attacks", "fgsm"],
        "compare": [finished, finished],
        "export": [finished, "--to", "safetensors", "--out", tmp_path / "export"],
        "reproduce": ["--list"],
        "bench": [tiny, "--steps", "1"],
    }


@pytest.mark.parametrize("name", sorted(set(commands()) - NO_TABLE))
def test_every_command_takes_json(name):
    options = {option for parameter in commands()[name].params for option in parameter.opts}
    assert "--json" in options


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(commands()) - NO_TABLE - NO_NETWORK))
def test_with_json_standard_output_is_json_alone(name, example, command):
    result = command(*name.split(), *example[name], "--json")
    assert result.status == 0, result
    assert json.loads(result.out)


@pytest.mark.slow
def test_train_says_what_it_made(tiny, tmp_path, command):
    result = command("train", tiny, "--out", tmp_path / "run", "--json")
    found = json.loads(result.out)
    assert found["folder"] == str(tmp_path / "run")
    assert found["epochs"] == 1
    assert found["last_epoch"]["epoch"] == 0
    assert found["evaluation"] is None
    assert "epoch 1/1" in result.err
    again = command("train", tiny, "--out", tmp_path / "again", "--evaluate", "--json")
    assert json.loads(again.out)["evaluation"]["n"] == 40
    assert (tmp_path / "again" / "evaluation.json").exists()


def test_data_check_says_what_it_found(command):
    found = json.loads(command("data", "check", "digits", "--json").out)
    assert found["shape"] == [1, 8, 8]
    assert found["train"]["images"] == 1297
    assert found["test"]["official"] is False
    assert len(found["classes"]) == 10


def test_a_plan_can_be_read_before_it_is_run(command, tmp_path):
    result = command("reproduce", "table-cifar10", "--quick", "--dry-run", "--out", tmp_path, "--json")
    rows = json.loads(result.out)
    assert rows
    assert {type(row["done"]) for row in rows} == {bool}
    assert all(row["trial"] and row["attacks"] for row in rows)


def test_errors_leave_standard_output_empty(command, tmp_path):
    result = command("evaluate", tmp_path, "--json")
    assert (result.status, result.out) == (1, "")
