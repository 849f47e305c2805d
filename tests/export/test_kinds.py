"""Networks that an export has to treat specially, or to refuse with the right reason."""

import importlib.util
import logging

import pytest
import torch
from torch import nn

import atas
from atas.errors import AtasError, UsageError

needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxruntime", "onnxscript")),
    reason="needs the packages of atas[onnx]",
)
GRAPHS = [pytest.param("onnx", marks=needs_onnx), "torch-export"]


class Random(nn.Module):
    """Adds noise in every mode."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        return self.fc(x.flatten(1)) + 0.1 * torch.rand(x.shape[0], 10)


class Counting(Random):
    """Fixes the number of images when it is traced."""

    def forward(self, x):
        return self.fc(x.view(len(x), -1))


class Deciding(Random):
    """Depends on values."""

    def forward(self, x):
        return self.fc(x.flatten(1)) * (2 if bool(x.sum() > 0) else 1)


def linear():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    """PyTorch prints graphs that it cannot trace."""
    monkeypatch.setattr(logging.getLogger("torch.fx.experimental.symbolic_shapes"), "disabled", True)


@pytest.fixture
def run_of(train_tiny, tmp_path):
    return lambda model: train_tiny(tmp_path / "run", {"training.epochs": 1}, model=model)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["safetensors", *GRAPHS])
def test_a_random_model_is_written_with_a_note(to, run_of):
    written = atas.export.write(run_of(Random()), to)
    assert written.check is None
    assert "other logits for the same images in every pass" in written.notes[-1]
    assert written.files[0].stat().st_size


@pytest.mark.slow
@pytest.mark.parametrize("to", GRAPHS)
def test_a_fixed_number_of_images_is_named(to, run_of):
    with pytest.raises(AtasError, match=r"fixes the number of images; use x\.shape\[0\] in place of len\(x\)"):
        atas.export.write(run_of(Counting()), to)


@pytest.mark.slow
@pytest.mark.parametrize("to", GRAPHS)
def test_the_reason_is_the_innermost_without_colours(to, run_of, capfd):
    with pytest.raises(AtasError, match=r"dynamic batch size \(Could not .*look for code in its forward") as caught:
        atas.export.write(run_of(Deciding()), to)
    assert "\x1b" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("to", GRAPHS)
def test_of_a_compiled_model_the_network_is_exported(to, run_of):
    written = atas.export.write(run_of(torch.compile(linear(), backend="aot_eager")), to)
    assert written.difference < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("to", GRAPHS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
def test_a_scripted_model_is_exported_by_its_network(to, run_of):
    run = run_of(torch.jit.script(linear()))
    with pytest.raises(AtasError, match=r"can be exported to safetensors only; load the run with the network"):
        atas.export.write(run, to)
    assert atas.export.write(atas.Run.load(run.folder, model=linear()), to).difference < 1e-4


def test_the_folder_of_a_model_passed_in_python(run_of):
    run = run_of(linear())
    with pytest.raises(UsageError, match=r"export it there: atas\.export\.write\(atas\.Run\.load\(.*, model=network\)"):
        atas.export.write(run.folder, "safetensors")
    assert atas.export.write(run, "safetensors").files
