"""RobustBench: an entry with its spelling, and a network that needs nothing of this library."""

import ast
import dataclasses
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import atas
from atas.errors import UsageError
from atas.export.base import ExportSource
from atas.export.robustbench import model_info, module_name, standalone_definition
from atas.export.standalone import inline_source
from atas.models.registry import class_and_settings

ALONE = """
import sys
sys.modules["atas"] = None  # importing it is an error from here on
from safetensors.torch import load_file, save_file
import torch
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
sys.path.insert(0, {folder!r})
from {stem} import load
model = load()
assert not model.training
with torch.no_grad():
    save_file({{"logits": model(load_file({pixels!r})["pixels"])}}, {logits!r})
assert not [name for name in sys.modules if name.startswith("atas.")]
"""
FIELDS = (
    "link name authors additional_data number_forward_passes dataset venue architecture eps clean_acc reported "
    "autoattack_acc footnote"
)


@pytest.mark.slow
def test_the_definition_alone_says_the_same_to_the_bit(evaluated, tmp_path, pixels, logits_of):
    written = atas.export.write(evaluated, "robustbench", tmp_path / "out")
    assert [path.name for path in written.files] == [
        "tiny_run.json",
        "tiny_run.py",
        "tiny_run.safetensors",
        "README.md",
    ]
    save_file({"pixels": pixels}, tmp_path / "pixels")
    places = {name: str(tmp_path / name) for name in ("pixels", "logits")}
    script = ALONE.format(folder=str(tmp_path / "out"), stem="tiny_run", **places)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert torch.equal(load_file(tmp_path / "logits")["logits"], logits_of)
    assert written.difference == 0


@pytest.mark.parametrize("name", atas.models.names())
def test_every_network_of_the_library_stands_alone(name, evaluated, monkeypatch):
    """The definitions are run where `atas` cannot be imported; names and shapes of the weights are the library's."""
    network, settings = class_and_settings(name)
    classes = [value for value in settings.values() if isinstance(value, type)]
    text = inline_source(atas.models.Normalize, *classes, network)
    imported = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    modules = {getattr(node, "module", None) or node.names[0].name for node in imported}
    assert not [module for module in modules if module.startswith("atas")]
    space = {"__name__": "alone"}
    monkeypatch.setitem(sys.modules, "atas", None)
    exec(compile(text, "alone.py", "exec"), space)
    monkeypatch.undo()
    found = {key: space[value.__name__] if isinstance(value, type) else value for key, value in settings.items()}
    with torch.device("meta"):
        alone = space[network.__name__](7, space["Normalize"](3), **found)
        ours = atas.models.create(name, 7)
    assert {key: value.shape for key, value in alone.state_dict().items()} == {
        key: value.shape for key, value in ours.state_dict().items()
    }
    assert type(alone) is not type(ours)


def test_the_definition_of_a_network_with_settings(evaluated, train_tiny, tmp_path, monkeypatch):
    """A call with classes among its settings is written so that it can be read again."""
    source = ExportSource.load(evaluated)
    settings = source.run.recipe.with_values({"model.name": "resnet18"})
    source = dataclasses.replace(source, run=dataclasses.replace(source.run, recipe=settings))
    text = standalone_definition(source, "net")
    assert "ResNet(10, Normalize(1, [0.5], [0.25]), block=BasicBlock, blocks=(2, 2, 2, 2))" in text
    compile(text, "net.py", "exec")


def test_the_entry_of_a_run_with_autoattack(copy_of, with_autoattack):
    folder = copy_of()
    result = with_autoattack(folder)
    entry = model_info(ExportSource.load(folder))
    assert list(entry) == FIELDS.split()
    assert entry["dataset"] == "digits"
    assert entry["eps"] == "0.1"
    assert entry["number_forward_passes"] == 1
    assert entry["additional_data"] is False
    assert entry["clean_acc"] == f"{100 * result.accuracy['clean']:.2f}"
    assert entry["autoattack_acc"] == entry["reported"] == f"{100 * result.accuracy['autoattack']:.2f}"
    assert "60 test images" in entry["footnote"]
    assert "Warning: the gradients" in entry["footnote"]


def test_the_entry_of_a_run_without_autoattack(evaluated):
    entry = model_info(ExportSource.load(evaluated))
    assert entry["autoattack_acc"] is None
    assert entry["reported"] is not None
    assert "AutoAttack was not run." in entry["footnote"]


def test_the_entry_of_a_run_without_evaluation(copy_of):
    folder = copy_of()
    (folder / "evaluation.json").unlink()
    written = atas.export.write(folder, "robustbench")
    entry = json.loads(written.files[0].read_text())
    assert {entry[key] for key in ("clean_acc", "reported", "autoattack_acc")} == {None}
    assert "Not evaluated." in entry["footnote"]


def test_a_budget_in_grey_levels_is_written_so(evaluated):
    source = ExportSource.load(evaluated)
    settings = source.run.recipe.with_values({"method.eps": "8/255"})
    source = dataclasses.replace(source, run=dataclasses.replace(source.run, recipe=settings))
    assert model_info(source)["eps"] == "8/255"


def test_a_network_of_ones_own_is_refused(train_tiny, own_net, tmp_path):
    run = train_tiny(tmp_path / "run", {"training.epochs": 1}, model=own_net())
    with pytest.raises(UsageError, match=r"user code \(OwnNet\).*built-in networks only .*use --to safetensors"):
        atas.export.write(run, "robustbench")


@pytest.mark.parametrize(
    ("name", "identifier"),
    [("cifar10-wrn", "cifar10_wrn"), ("3 nets", "model_3_nets"), ("été/..", "t"), ("'\"; x", "x"), ("--", "model")],
)
def test_names_of_modules(name, identifier):
    assert module_name(name) == identifier
    assert identifier.isidentifier()
