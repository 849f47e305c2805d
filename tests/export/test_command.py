"""`atas export`."""

import json

import pytest
from safetensors.torch import save_file
from typer.testing import CliRunner

import atas
from atas import export
from atas.cli import app
from atas.cli.export import Format
from atas.errors import CheckpointError, DataError, UsageError
from atas.models.weights import read_weights


def run(*arguments):
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


def test_the_commands_formats_are_the_librarys():
    assert tuple(Format) == export.FORMATS


def test_the_files_are_named(copy_of):
    folder = copy_of()
    result = run(folder, "--to", "safetensors")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("checked in ")
    assert lines[1:] == [
        f"written: {folder / 'export' / 'safetensors' / name}" for name in ("model.safetensors", "README.md")
    ]


def test_json(evaluated, tmp_path):
    result = run(evaluated, "--to", "torch-export", "--out", tmp_path / "out", "--json")
    found = json.loads(result.stdout)
    assert found["folder"] == str(tmp_path / "out")
    assert found["files"] == [str(tmp_path / "out" / name) for name in ("model.pt2", "README.md")]
    assert found["difference"] < 1e-5


def test_exporting_again_replaces(copy_of):
    folder = copy_of()
    for _ in range(2):
        assert run(folder, "--to", "safetensors").exit_code == 0
    assert sorted(path.name for path in (folder / "export" / "safetensors").iterdir()) == [
        "README.md",
        "model.safetensors",
    ]


def test_a_project_and_a_run_are_not_written_over(copy_of, tmp_path):
    """Such as a README.md of one's own, and the run's weights by those in float16."""
    folder = copy_of()
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "README.md").write_text("# My project\n")
    for out, reason in ((tmp_path / "project", "a README.md that is no model card"), (folder, "the folder of a run")):
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        result = run(folder, "--to", "hub", "--out", out)
        assert isinstance(result.exception, UsageError)
        assert reason in str(result.exception)
        assert "choose another folder" in str(result.exception)
        assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    for _ in range(2):
        assert run(folder, "--to", "hub", "--out", tmp_path / "new").exit_code == 0
    (tmp_path / "file").touch()
    assert "is a file" in str(run(folder, "--to", "hub", "--out", tmp_path / "file").exception)


def test_a_run_begun_anew_takes_its_exports_along(copy_of, train_tiny):
    folder = copy_of()
    run(folder, "--to", "safetensors")
    train_tiny(folder, {"training.epochs": 1}, overwrite=True)
    assert not (folder / "export").exists()


def test_folder_that_is_no_run_is_refused(tmp_path):
    assert isinstance(run(tmp_path, "--to", "onnx").exception, DataError)


@pytest.mark.parametrize("key", ["classes", "mean"])
def test_metadata_that_the_weights_lack(copy_of, key):
    """Such as an early version wrote them."""
    weights = copy_of() / "model.safetensors"
    metadata, tensors = read_weights(weights)
    del metadata[key]
    save_file(tensors, weights, {"atas-model-1": json.dumps(metadata)})
    run = atas.Run.load(weights.parent, model=atas.models.create("small-cnn", 10, 1))
    with pytest.raises(DataError, match=f"the metadata of .* has no {key}; train again"):
        export.write(run, "safetensors")


@pytest.mark.parametrize("arguments", [["runs/mine"], ["runs/mine", "--to", "keras"]])
def test_wrong_use(arguments):
    assert run(*arguments).exit_code == 2


def test_a_full_disk_is_told_with_what_to_do(copy_of, monkeypatch):
    """The command has no --resume."""
    from atas.models import weights

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights, "save_file", full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*; make room and export again$"):
        export.write(copy_of(), "safetensors")


def test_what_a_killed_export_left_is_removed_by_the_next(copy_of):
    folder = copy_of() / "export" / "safetensors"
    (folder / ".model.safetensors.0a1b2c3d.tmp").mkdir(parents=True)
    (folder / ".model.safetensors.0a1b2c3d.tmp" / "model.safetensors.tmp").write_bytes(b"half")
    export.write(folder.parents[1], "safetensors")
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", "model.safetensors"]
