"""A folder for Hugging Face: half the size, the same predictions, and a card that its readers can parse."""

import json

import pytest
import torch
from safetensors.torch import load_file

import atas
from atas.errors import UsageError


@pytest.fixture(scope="module")
def folder(evaluated, tmp_path_factory):
    return atas.export.write(evaluated, "hub", tmp_path_factory.mktemp("hub")).folder


@torch.no_grad()
def test_weights_are_rounded_and_predict_the_same(folder, evaluated, pixels, logits_of):
    original, rounded = (load_file(path / "model.safetensors") for path in (evaluated, folder))
    for name, value in original.items():
        assert torch.equal(rounded[name], value.half() if value.dim() > 1 else value), name
    logits = atas.load(folder / "model.safetensors")(pixels)
    assert torch.equal(logits.argmax(1), logits_of.argmax(1))
    torch.testing.assert_close(logits, logits_of, rtol=0, atol=1e-2 * float(logits_of.abs().max()))


def test_values_beyond_float16_are_kept(train_tiny, tmp_path):
    run = train_tiny(tmp_path / "run")
    with torch.no_grad():
        run.model.bn1.running_var.fill_(1e9)
        run.model.fc.weight[0, 0] = 1e5
    atas.models.weights.save_weights(tmp_path / "large.safetensors", run.model, {"name": "x"}, half=True)
    saved = load_file(tmp_path / "large.safetensors")
    assert float(saved["bn1.running_var"][0]) == 1e9
    assert saved["fc.weight"].dtype == torch.float32
    assert saved["conv1.weight"].dtype == torch.float16


def test_the_metadata_as_json(folder, evaluated):
    config = json.loads((folder / "config.json").read_text())
    assert config["library_name"] == "atas"
    assert (config["name"], config["num_classes"], config["eps"]) == ("small-cnn", 10, 0.1)
    assert config["weights"] == atas.Evaluation.load(evaluated / "evaluation.json").weights


def test_the_front_matter_has_the_results(folder, evaluated):
    _, front, _ = (folder / "README.md").read_text().split("---\n", 2)
    (line,) = [line for line in front.splitlines() if line.startswith("model-index: ")]
    (entry,) = json.loads(line.removeprefix("model-index: "))
    metrics = {metric["name"]: metric["value"] for metric in entry["results"][0]["metrics"]}
    result = atas.Evaluation.load(evaluated / "evaluation.json")
    assert metrics["pgd10, Linf(0.1), 60 images"] == round(100 * result.accuracy["pgd10"], 2)


def test_networks_of_ones_own_are_refused(train_tiny, own_net, tmp_path):
    run = train_tiny(tmp_path / "run", model=own_net())
    with pytest.raises(UsageError, match="user code, which a repository of weights cannot hold"):
        atas.export.write(run, "hub", tmp_path / "out")
