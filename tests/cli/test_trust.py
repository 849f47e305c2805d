"""A run folder from someone else runs no code until the user says so."""

import json
import sys

import pytest
from helpers.run_files import recipe_text
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import atas
from atas import attacks
from atas.errors import DataError, UsageError
from atas.models.weights import load_weights

EVIL = """
from pathlib import Path

Path({trace!r}).touch()

from atas import data, models
from atas.methods import FGSM


def build(num_classes, channels):
    return models.create("small-cnn", num_classes, channels)


def images():
    return data.load("digits")


class Method(FGSM):
    def __init__(self, threat, examples, shape, *, width: float = 1.0, **common):
        super().__init__(threat, examples, shape, **common)
"""
SENTENCE = "the {kind} evil:{name} is not loaded: it is code, which would be run; if you trust it, pass --trust"


@pytest.fixture
def trace(tmp_path, monkeypatch):
    """The file that the code of a stranger leaves; the code is where the command is run, first on the path."""
    trace = tmp_path / "the code ran"
    (tmp_path / "evil.py").write_text(EVIL.format(trace=str(trace)))
    monkeypatch.chdir(tmp_path)
    yield trace
    sys.modules.pop("evil", None)


def rename_model(path, name):
    with safe_open(path, framework="pt") as file:
        header = dict(file.metadata())
    (key,) = header
    header[key] = json.dumps(json.loads(header[key]) | {"name": name})
    save_file(load_file(path), path, header)


@pytest.fixture
def named_model(copy_of, trace):
    """A run whose recipe and weights name a function as its model."""
    folder = copy_of("named-model")
    recipe = recipe_text(folder)
    assert 'name = "small-cnn"' in recipe
    (folder / "recipe.toml").write_text(recipe.replace('name = "small-cnn"', 'name = "evil:build"'))
    rename_model(folder / "model.safetensors", "evil:build")
    return folder


@pytest.fixture
def named_method(copy_of, trace):
    """A run whose recipe names a class as its method."""
    folder = copy_of("named-method")
    recipe = recipe_text(folder)
    head, _, rest = recipe.partition("[method]")
    rest = rest[rest.index("[optimizer]") :]
    method = '[method]\nname = "evil:Method"\nnorm = "linf"\neps = 0.1\nwidth = "51/255"\n\n'
    (folder / "recipe.toml").write_text(head + method + rest)
    return folder


def test_compare_imports_nothing(command, named_model, named_method, trace):
    done = command("compare", named_model, named_method)
    assert done.status == 0, done
    assert "evil:Method" in done.out
    assert not trace.exists()


@pytest.mark.parametrize(
    "arguments",
    [("evaluate", "RUN"), ("export", "RUN", "--to", "safetensors"), ("export", "RUN", "--to", "onnx")],
)
def test_a_named_model_is_not_imported(arguments, command, named_model, trace):
    done = command(*(named_model if word == "RUN" else word for word in arguments))
    done.sentence(SENTENCE.format(kind="model", name="build"), status=2)
    assert not trace.exists()


def test_weights_do_not_import_what_they_name(command, named_model, trace):
    weights = named_model / "model.safetensors"
    options = ("--weights", weights, "--data", "digits", "--eps", "0.1", "--attacks", "fgsm", "--examples", "4")
    command("evaluate", *options).sentence(SENTENCE.format(kind="model", name="build"), status=2)
    assert not trace.exists()
    assert command("evaluate", *options, "--model", "small-cnn").status == 0
    assert not trace.exists(), "the user named another network"


@pytest.mark.slow
def test_a_report_is_written_without_the_code(command, named_model, trace):
    assert command("report", named_model).status == 0
    assert not trace.exists()


@pytest.mark.slow
def test_a_named_method_is_of_no_use_to_a_finished_run(command, named_method, trace):
    few = ("--attacks", "fgsm", "--examples", "4")
    assert command("evaluate", named_method, *few).status == 0
    assert command("report", named_method).status == 0
    assert command("export", named_method, "--to", "safetensors").status == 0
    assert atas.Run.load(named_method).recipe.method.settings == {"width": 0.2}
    assert not trace.exists()


def test_plans_trust_the_model_that_they_name(named_model, trace):
    """As a plan loads a finished training; the folder may name another model than the plan."""
    weights = named_model / "model.safetensors"
    with pytest.raises(UsageError, match="evil:build"):
        load_weights(weights, trust="mine:build")
    assert not trace.exists()
    assert load_weights(weights, trust="evil:build").training is False


def test_python_asks_too(named_model, named_method, trace):
    sentence = SENTENCE.format(kind="model", name="build")
    for load in (atas.load, atas.Run.load, lambda folder: atas.export.write(folder, "safetensors")):
        with pytest.raises(UsageError, match=sentence):
            load(named_model)
    with pytest.raises(UsageError, match="evil:build"):
        atas.load(named_model / "model.safetensors")
    assert not trace.exists()


@pytest.mark.slow
def test_trust_allows_it(command, named_model, trace):
    few = ("--attacks", "fgsm", "--examples", "4", "--out", "result.json")
    assert command("evaluate", named_model, *few, "--trust").status == 0
    assert trace.exists()
    assert command("export", named_model, "--to", "safetensors", "--trust").status == 0
    assert atas.load(named_model, trust=True).training is False
    assert atas.load(named_model / "model.safetensors", trust=True).training is False


def test_resuming_asks_unless_the_recipe_is_given(command, named_method, trace):
    resume = ("train", "--resume", "--out", named_method)
    command(*resume).sentence(SENTENCE.format(kind="method", name="Method"), status=2)
    assert not trace.exists()
    # Weights and checkpoint are of another method, which is found out only after its code has run.
    command(*resume, "--trust").sentence("belongs to another run", status=1)
    assert trace.exists()
    trace.unlink()
    sys.modules.pop("evil")
    command("train", named_method / "recipe.toml", "--resume", "--out", named_method).sentence(
        "belongs to another run", status=1
    )
    assert trace.exists()


@pytest.mark.slow
def test_commands_that_are_suggested_for_a_run_of_ones_own_code_work(command, trace):
    values = ("--set", "training.epochs=1", "--set", "model.name=evil:build", "--out", "mine")
    assert "next: atas evaluate mine --trust" in command("train", "digits-small-cnn-fgsm", *values).out
    (trace.parent / "mine" / "model.safetensors").unlink()
    with pytest.raises(DataError, match="continue with: atas train --resume --out mine --trust"):
        atas.Run.load("mine", trust=True)
    with pytest.raises(DataError, match=r"continue with: atas train --resume --out mine$"):
        atas.Run.load("mine")  # nobody said that it is to be trusted


def test_trust_in_a_recipe_is_not_written(named_method, trace):
    run = atas.Run.load(named_method)
    assert not run.recipe.trusted
    assert "trust" not in run.recipe.to_toml()
    changed = run.recipe.with_values({"training.epochs": 2})
    assert not changed.trusted
    with pytest.raises(UsageError, match="evil:Method is not loaded"):
        atas.train(changed, out="again")
    assert not trace.exists()
    assert atas.Run.load(named_method, trust=True).recipe == run.recipe
    assert trace.exists()


@pytest.mark.slow
def test_a_recipe_of_a_folder_trains_if_trusted(named_method, trace):
    """As the error of a training without it advises."""
    recipe = atas.Run.load(named_method).recipe.with_values({"training.epochs": 1})
    run = atas.train(recipe, out="again", trust=True)
    assert trace.exists()
    assert run.recipe.trusted
    assert run.recipe.method == recipe.method


def test_attacks_are_never_code(trace):
    with pytest.raises(UsageError, match="unknown"):
        attacks.create("evil:build")
    assert not trace.exists()


@pytest.fixture
def named_data(copy_of, trace):
    """A run whose recipe names a function as its data."""
    folder = copy_of("named-data")
    recipe = recipe_text(folder)
    assert 'name = "digits"' in recipe
    (folder / "recipe.toml").write_text(recipe.replace('name = "digits"', 'name = "evil:images"'))
    return folder


@pytest.mark.slow
def test_named_data_is_not_imported(named_data, trace, command):
    for words in (("evaluate", named_data, "--attacks", "fgsm"), ("train", "--resume", "--out", named_data)):
        command(*words).sentence(SENTENCE.format(kind="data set", name="images"), status=2)
    assert command("report", named_data).status == 0
    assert command("export", named_data, "--to", "safetensors").status == 0
    assert not trace.exists()
    assert command("evaluate", named_data, "--attacks", "fgsm", "--examples", 4, "--trust").status == 0
    assert trace.exists()
    assert atas.Run.load(named_data, trust=True).recipe.trust_option == " --trust"


def test_settings_of_a_class_that_is_not_imported(named_method, trace):
    """Their keys and values are written to cards and pages, so they are words, numbers and texts."""
    recipe = recipe_text(named_method)
    for line in ('"a b" = 1', '"```" = 1', "width = {a = 1}", "width = 1979-05-27", "width = [[[1]]]"):
        (named_method / "recipe.toml").write_text(recipe.replace('width = "51/255"', line))
        with pytest.raises(UsageError, match=r"method\."):
            atas.Run.load(named_method)
    assert not trace.exists()
