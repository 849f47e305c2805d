"""Fine-tuning: a training starts from the weights of a run, of an export or of torch.save, which the run identifies."""

import shutil

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import atas
from atas.core.fingerprint import weights_hash
from atas.errors import DataError, UsageError
from atas.models import published
from atas.models.weights import read_weights, save_weights
from atas.recipes import recipe_fingerprint
from atas.training import Run
from atas.training.build import build_model
from atas.training.initial_weights import identify_weights, load_initial_weights
from atas.training.run import RunFolder, load_recipe
from atas.training.trainer import Interrupted

SMALL = {"model.name": "small-cnn", "training.epochs": 1}


@pytest.fixture(scope="module")
def tune(toy_data, toy_recipe, observer):
    """Train the recipe's own network on the toy data: `tune(folder, weights=..., **values)`."""

    def train(out, method="fgsm", live=None, data=toy_data, resume=False, **values):
        recipe = toy_recipe(method, SMALL | {key.replace("__", "."): value for key, value in values.items()})
        live = live or observer()
        return atas.train(recipe, out=out, data=data, live=live, resume=resume), live.said

    return train


@pytest.fixture(scope="module")
def base(tmp_path_factory, tune):
    """A run with a normalisation of its own."""
    folder = tmp_path_factory.mktemp("base") / "run"
    tune(folder, "standard", model__mean=[0.25], model__std=[0.5], training__epochs=8)
    return folder


@pytest.fixture(scope="module")
def start_of(toy_data, toy_recipe):
    """The recipe with its weights identified, the model that its training begins with, and what is said."""

    def find(base_recipe, **values):
        recipe = toy_recipe("fgsm", SMALL | {key.replace("__", "."): value for key, value in values.items()})
        recipe = identify_weights(recipe, RunFolder(base_recipe / "none"), resume=False)
        model = build_model(recipe, toy_data)
        return recipe, model, load_initial_weights(model, recipe)

    return find


def save_as(kind, base, folder):
    """The weights of a run in another kind of file, or the folder itself."""
    _, tensors = read_weights(base / "model.safetensors")
    if kind == "run":
        return base
    path = folder / f"weights.{kind}"
    if kind == "safetensors":
        return base / "model.safetensors"
    if kind == "st":
        save_file(tensors, path)
    elif kind == "pt":
        torch.save(tensors, path)
    elif kind == "pth":  # of a training loop in DataParallel
        torch.save({"model": {f"module.{name}": value for name, value in tensors.items()}, "epoch": 3}, path)
    return path


@pytest.mark.parametrize("kind", ["run", "safetensors", "st", "pt", "pth"])
def test_every_kind_of_file_is_a_start(kind, base, tmp_path, start_of):
    recipe, model, notes = start_of(tmp_path, model__weights=str(save_as(kind, base, tmp_path)))
    assert weights_hash(model) == recipe.model.weights_hash == weights_hash(Run.load(base).model)
    assert recipe.model.mean == (0.25,)
    assert recipe.model.std == (0.5,)
    assert notes == []


def test_a_published_model_is_a_start(base, tmp_path, start_of, monkeypatch):
    monkeypatch.setattr(published, "is_name", lambda text: text == "tiny")
    monkeypatch.setattr(published, "locate", lambda name: base / "model.safetensors")
    _, model, _ = start_of(tmp_path, model__weights="tiny")
    assert weights_hash(model) == weights_hash(Run.load(base).model)


def test_the_recipe_has_the_last_word_on_the_normalisation(base, tmp_path, start_of):
    recipe, model, notes = start_of(tmp_path, model__weights=str(base), model__mean=[0.4])
    assert recipe.model.mean == (0.4,)
    assert recipe.model.std == (0.5,)
    assert float(model.normalize.mean) == pytest.approx(0.4)
    assert notes == ["model.mean is the recipe's; the weights were trained with 0.25"]


@pytest.mark.slow
def test_a_run_starts_where_the_other_ended(base, tmp_path, tune):
    """With a learning rate of nearly zero it stays there, robust training or not."""
    run, said = tune(tmp_path / "run", model__weights=str(base), schedule__peak=1e-12)
    assert run.metrics[0]["clean"] == Run.load(base).metrics[-1]["clean"] > 0.6
    assert not any("head" in sentence for sentence in said)
    fresh, _ = tune(tmp_path / "fresh", schedule__peak=1e-12)
    assert fresh.metrics[0]["clean"] < 0.5
    assert recipe_fingerprint(run.recipe) != recipe_fingerprint(fresh.recipe)
    again = Run.load(tmp_path / "run")
    assert float(again.model.normalize.mean) == 0.25
    assert weights_hash(again.model) == weights_hash(run.model)
    card = (atas.export.write(run, "safetensors").folder / "README.md").read_text()
    assert f'weights = "{base.name}"\nweights_hash = "{weights_hash(Run.load(base).model)}"' in card
    assert str(base) not in card


@pytest.mark.slow
def test_other_classes_get_another_head(base, tmp_path, tune, toy_data):
    split = toy_data.train
    data = atas.data.from_arrays("five", split.images, torch.arange(60) % 5, split.images[:20], torch.arange(20) % 5)
    run, said = tune(tmp_path / "run", data=data, model__weights=str(base))
    assert said.count("the head was replaced: 3 -> 5 classes") == 1
    assert run.model.fc.weight.shape == (5, 64)
    assert Run.load(tmp_path / "run").model.fc.weight.shape == (5, 64)


@pytest.mark.slow
def test_a_resume_needs_no_file(base, tmp_path, tune, toy_data, observer, interrupt_after, assert_same_run):
    source = tmp_path / "source"
    shutil.copytree(base, source)
    values = {"model__weights": str(source), "training__epochs": 2}
    tune(tmp_path / "whole", **values)
    for how in ("by its folder", "with its recipe"):
        part = tmp_path / how
        with pytest.raises(Interrupted):
            tune(part, live=interrupt_after(3), **values)
        shutil.move(source, tmp_path / "moved")
        if how == "by its folder":
            atas.train(out=part, resume=True, data=toy_data, live=observer())
        else:
            tune(part, resume=True, **values)
        assert_same_run(tmp_path / "whole", part)
        shutil.move(tmp_path / "moved", source)


@pytest.mark.slow
def test_other_weights_are_another_run(base, tmp_path, tune, toy_data, interrupt_after):
    path = tmp_path / "weights.safetensors"
    shutil.copy(base / "model.safetensors", path)
    values = {"model__weights": str(path), "training__epochs": 2}
    with pytest.raises(Interrupted):
        tune(tmp_path / "run", live=interrupt_after(3), **values)
    model = Run.load(base).model
    metadata, _ = read_weights(path)
    with torch.no_grad():
        model.fc.bias += 1
    save_weights(path, model, {key: metadata[key] for key in metadata if key != "weights"})
    with pytest.raises(UsageError, match=r"was started with another recipe \(model.weights_hash: .* became "):
        tune(tmp_path / "run", resume=True, **values)
    shutil.copytree(tmp_path / "run", tmp_path / "early")
    shutil.rmtree(tmp_path / "early" / "checkpoints")  # stopped before its first checkpoint
    own = load_recipe(RunFolder(tmp_path / "early"))
    with pytest.raises(UsageError, match=r"does not hold the weights of the recipe .* or remove model\.weights_hash"):
        atas.train(own, out=tmp_path / "new", data=toy_data)
    with pytest.raises(UsageError, match="does not hold the weights of the recipe"):
        atas.train(out=tmp_path / "early", resume=True, data=toy_data)
    other = tmp_path / "other.safetensors"
    shutil.copy(base / "model.safetensors", other)  # the same weights elsewhere
    tune(tmp_path / "run", resume=True, **values | {"model__weights": str(other)})


def test_weights_for_other_channels_are_named(tmp_path, tune):
    torch.save(atas.models.create("small-cnn", num_classes=10, channels=3).state_dict(), tmp_path / "colour.pt")
    with pytest.raises(DataError, match=r"colour\.pt .*are for images of 3 channels, and those of the data have 1"):
        tune(tmp_path / "out", model__weights=str(tmp_path / "colour.pt"))


@pytest.mark.slow
def test_a_network_of_ones_own_starts_from_a_file(tmp_path, train_toy, tiny_net):
    given = tiny_net(seed=5)
    torch.save(given.state_dict(), tmp_path / "own.pt")
    values = {"model.weights": str(tmp_path / "own.pt"), "training.epochs": 1, "schedule.peak": 1e-12}
    run = train_toy(tmp_path / "run", "fgsm", values, model=tiny_net())
    torch.testing.assert_close(run.model.fc.weight, given.fc.weight)


class Danger:
    def __reduce__(self):
        return print, ("the code ran",)


def broken(kind, folder, base):
    """A start that is none, and the sentence about it."""
    path = folder / "broken.pt"
    if kind == "absent":
        return path, "there is no weights file"
    if kind == "folder":
        folder.joinpath("empty").mkdir()
        return folder / "empty", "there is no weights file .*model.safetensors"
    if kind == "unfinished":
        shutil.copytree(base, folder / "run")
        (folder / "run" / "model.safetensors").unlink()
        return folder / "run", "has not finished; continue it with: atas train --resume --out"
    if kind == "code":
        torch.save({"weight": Danger()}, path)
        return path, "is a pickle that holds more than tensors"
    if kind == "other network":
        torch.save(nn.Linear(2, 2).state_dict(), path)
        return path, "do not fit the network"
    path.write_bytes(b"nothing")
    return path, "cannot be read"


@pytest.mark.parametrize("kind", ["absent", "folder", "unfinished", "code", "other network", "noise"])
def test_a_start_that_is_none(kind, base, tmp_path, tune, capsys):
    path, sentence = broken(kind, tmp_path, base)
    with pytest.raises(DataError, match=sentence):
        tune(tmp_path / "out", model__weights=str(path))
    assert not (tmp_path / "out").exists()
    assert "the code ran" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"model.weights": ""}, "model.weights must be the path"),
        ({"model.weights_hash": "abc"}, "model.weights_hash has no effect without model.weights"),
        ({"model.pretrained": True}, "model.pretrained is for networks of timm"),
        ({"model.name": "timm:x", "model.pretrained": True, "model.weights": "a"}, "are two starts of a training"),
    ],
)
def test_settings_that_contradict_each_other(values, sentence, toy_recipe):
    with pytest.raises(UsageError, match=sentence):
        toy_recipe("fgsm", values)


def test_the_hash_and_not_the_path_is_the_identity(toy_recipe):
    def fingerprint(**values):
        return recipe_fingerprint(toy_recipe("fgsm", {f"model.{key}": value for key, value in values.items()}))

    assert fingerprint(weights="a", weights_hash="1") == fingerprint(weights="b", weights_hash="1")
    kinds = [fingerprint(), fingerprint(weights="a"), fingerprint(weights="b")]
    kinds += [fingerprint(weights="a", weights_hash=value) for value in ("1", "2")]
    assert len(set(kinds)) == 5
