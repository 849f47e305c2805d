"""ONNX and torch.export: the same answers for any number of images, without the model's code."""

import json
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import nn

import atas
from atas.errors import AtasError

needs_onnx = pytest.mark.skipif(
    not all(find_spec(name) for name in ("onnx", "onnxruntime", "onnxscript")),
    reason="needs the packages of the extra `onnx`",
)


class DependsOnTheBatch(nn.Module):
    """A model that cannot be exported with a dynamic batch size."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        if float(x.detach().sum()) > 1e9:
            x = -x
        return self.fc(x.flatten(1))


@pytest.fixture(scope="module")
def onnx_export(evaluated, tmp_path_factory):
    return atas.export.write(evaluated, "onnx", tmp_path_factory.mktemp("onnx"))


@needs_onnx
@pytest.mark.parametrize("count", [1, 2, 8])
def test_onnx_says_the_same_for_any_number_of_images(count, onnx_export, pixels, logits_of):
    import onnxruntime

    session = onnxruntime.InferenceSession(onnx_export.files[0], providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"pixels": pixels[:count].numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), logits_of[:count], rtol=1e-4, atol=1e-5)


@needs_onnx
def test_the_onnx_file_is_whole_and_says_what_it_is(onnx_export, evaluated):
    import onnx

    model = onnx.load(onnx_export.files[0], load_external_data=False)
    onnx.checker.check_model(model)
    about = {entry.key: entry.value for entry in model.metadata_props}
    assert json.loads(about["atas"])["threat"] == "Linf(0.1)"
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    assert sorted(path.name for path in onnx_export.folder.iterdir()) == ["README.md", "model.onnx"]


@needs_onnx
def test_the_check_is_reported_and_in_the_card(onnx_export):
    assert onnx_export.difference < 1e-4
    assert "onnxruntime" in onnx_export.check
    assert "32 test images of digits" in onnx_export.check
    assert onnx_export.check in (onnx_export.folder / "README.md").read_text()


@pytest.mark.slow
@needs_onnx
@pytest.mark.parametrize("error", [1e-1, 1e-3], ids=str)
def test_an_onnx_file_that_says_something_else_is_not_kept(error, evaluated, tmp_path, monkeypatch):
    """By more than rounding, which is far below a thousandth of the largest logit."""
    import onnxruntime

    class Wrong(onnxruntime.InferenceSession):
        def run(self, *arguments):
            return [logits + error * max(abs(logits).max(), 1.0) for logits in super().run(*arguments)]

    monkeypatch.setattr(onnxruntime, "InferenceSession", Wrong)
    with pytest.raises(AtasError, match=r"differs from PyTorch: in onnxruntime .*logits differ by"):
        atas.export.write(evaluated, "onnx", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("missing", ["onnx", "onnxruntime", "onnxscript"])
def test_without_the_packages_of_onnx(missing, evaluated, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(AtasError, match=r"ONNX export needs more packages .*pip install 'atas\[onnx\]'"):
        atas.export.write(evaluated, "onnx", tmp_path)


@pytest.mark.slow
@torch.no_grad()
def test_torch_export_says_the_same_for_any_number_of_images(evaluated, tmp_path, pixels, logits_of):
    written = atas.export.write(evaluated, "torch-export", tmp_path)
    extra = {"atas.json": ""}
    model = torch.export.load(written.files[0], extra_files=extra).module()
    for count in (1, 2, 8):
        torch.testing.assert_close(model(pixels[:count]), logits_of[:count], rtol=1e-5, atol=1e-6)
    assert json.loads(extra["atas.json"])["name"] == "small-cnn"
    assert written.difference < 1e-5
    assert written.check in (tmp_path / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("to", [pytest.param("onnx", marks=needs_onnx), "torch-export"])
def test_a_model_that_cannot_be_exported(to, train_tiny, tmp_path):
    run = train_tiny(tmp_path / "run", {"training.epochs": 1}, model=DependsOnTheBatch())
    with pytest.raises(AtasError, match=r"PyTorch cannot export this model .*with a dynamic batch size") as caught:
        atas.export.write(run, to)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "run" / "export" / to).iterdir())


@pytest.mark.slow
def test_random_pixels_where_there_are_no_test_images(train_tiny, tmp_path):
    digits = atas.data.load("digits")
    data = atas.data.Dataset("mine", digits.train, digits.test)
    run = train_tiny(tmp_path / "run", {"training.epochs": 1}, data=data)
    written = atas.export.write(run, "torch-export")
    assert "32 images of random pixels (no test images found)" in written.check


def test_an_unknown_format(evaluated):
    with pytest.raises(AtasError, match="unknown format 'onx'; did you mean 'onnx'"):
        atas.export.write(evaluated, "onx")
