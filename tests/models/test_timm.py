"""Networks of timm by name: with a stand-in for timm, and with timm itself where it is installed."""

import sys
import types
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import atas
from atas import models, recipes
from atas._utils.imports import is_code
from atas.errors import UsageError
from atas.models.timm_network import TimmNetwork

OPTIONS = {"patch_size": 4, "depth": 2, "embed_dim": 24, "num_heads": 2}
VIT = {"model.name": "timm:vit_tiny_patch16_224", **{f"model.{key}": value for key, value in OPTIONS.items()}}


class Network(nn.Module):
    """What the stand-in builds; `network` as the name of a part is one that timm uses too."""

    def __init__(self, num_classes, in_chans, img_size=None, width=4):
        super().__init__()
        self.size, self.pos_embed = img_size, nn.Parameter(torch.zeros(1, 1, width))
        self.network, self.head = nn.Linear(in_chans, width), nn.Linear(width, num_classes)

    def no_weight_decay(self):
        return {"pos_embed"}

    def forward(self, x):
        return self.head(self.network(x.mean((2, 3))) + self.pos_embed[0])


@pytest.fixture
def stand_in(monkeypatch):
    """A package `timm` with two networks; it keeps the arguments of the last call."""
    module = types.ModuleType("timm")
    configs = {"conv": {"fixed_input_size": False}, "vit": {"fixed_input_size": True}}

    def create_model(name, pretrained, **arguments):
        module.called = {"name": name, "pretrained": pretrained, **arguments}
        if pretrained:
            raise OSError("cannot find the server\nfor several reasons")
        return Network(**arguments)

    module.create_model = create_model
    module.is_model = configs.__contains__
    module.list_models = lambda: list(configs)
    module.get_pretrained_cfg = lambda name: SimpleNamespace(mean=(0.4, 0.5, 0.6), std=(0.2, 0.2, 0.2), **configs[name])
    monkeypatch.setitem(sys.modules, "timm", module)
    return module


def test_a_network_gets_classes_channels_size_and_options(stand_in):
    model = models.create("timm:vit", 7, 3, size=(20, 30), options={"width": 6})
    assert stand_in.called == {
        "name": "vit", "pretrained": False, "num_classes": 7, "in_chans": 3, "img_size": (20, 30), "width": 6,
    }  # fmt: skip
    assert model(torch.rand(2, 3, 20, 30)).shape == (2, 7)
    models.create("timm:vit", 7, 3, size=(20, 30), options={"img_size": 40})
    assert stand_in.called["img_size"] == 40
    models.create("timm:conv", 7, 3, size=(20, 30))
    assert "img_size" not in stand_in.called


@pytest.mark.parametrize(
    ("channels", "given", "mean"), [(3, None, [0.4, 0.5, 0.6]), (1, None, [0.5]), (3, 0.25, [0.25] * 3)]
)
def test_it_normalises_as_timm_does_unless_told_otherwise(stand_in, channels, given, mean):
    model = models.create("timm:conv", 2, channels, given)
    assert model.normalize.mean.flatten().tolist() == pytest.approx(mean)
    x = torch.rand(2, channels, 4, 4)
    expected = model.timm((x - torch.tensor(mean).view(1, -1, 1, 1)) / 0.2)
    torch.testing.assert_close(model(x), expected)


def test_weights_of_the_bare_network_load(stand_in):
    model, other = models.create("timm:conv", 2), models.create("timm:conv", 2)
    model.load_state_dict(other.timm.state_dict())
    nn.Sequential(model).load_state_dict({f"0.{name}": value for name, value in other.timm.state_dict().items()})
    for name, value in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    model.load_state_dict(other.state_dict())
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict(other.timm.state_dict() | {"more": torch.ones(1)})


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("timm:vitt", {}, "unknown network of timm 'vitt'; did you mean 'vit'"),
        ("timm:hf-hub:someone/something", {}, "unknown network of timm 'hf-hub:someone/something'"),
        ("timm:", {}, "unknown network of timm ''"),
        ("timm:vit", {"widht": 3}, r"timm cannot build vit \(.*'widht'\); correct the options of \[model\]"),
        ("timm:vit", {"checkpoint_path": "a.pth"}, "model.checkpoint_path is no option"),
        ("timm:vit", {"pretrained_cfg": "x"}, "model.pretrained_cfg is no option"),
        ("small-cnn", {"width": 3}, "pretrained and options are for networks of timm"),
    ],
)
def test_wrong_names_and_options(stand_in, name, options, sentence):
    with pytest.raises(UsageError, match=sentence) as error:
        models.create(name, 2, options=options)
    assert "\n" not in str(error.value)


def test_without_a_network_nothing_is_downloaded(stand_in):
    with pytest.raises(UsageError, match=r"\(cannot find the server\); its weights are downloaded: connect"):
        models.create("timm:conv", 2, pretrained=True)


def test_without_timm(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)  # an import raises ModuleNotFoundError
    with pytest.raises(UsageError, match=r"timm:vit needs timm; install it with: pip install 'atas\[timm\]'"):
        models.create("timm:vit", 2)


def test_a_timm_that_cannot_be_imported(tmp_path, monkeypatch):
    """As with a torchvision that was built for another torch."""
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    sentence = r"timm, which cannot be imported \(operator torchvision::nms does not exist\); .* belongs to torch"
    with pytest.raises(UsageError, match=sentence):
        models.create("timm:vit", 2)


def test_a_name_is_no_code():
    assert not is_code("timm:vit")
    assert is_code("timmy:vit")


def test_options_are_keys_of_the_recipe(toy_vit):
    text = toy_vit.to_toml()
    assert 'name = "timm:vit_tiny_patch16_224"\ndepth = 2\nembed_dim = 24\n' in text
    assert recipes.from_dict(toy_vit.to_dict(), "again") == toy_vit
    backwards = toy_vit.with_values({key: VIT[key] for key in reversed(VIT)})
    assert recipes.recipe_fingerprint(backwards) == recipes.recipe_fingerprint(toy_vit)
    assert recipes.recipe_fingerprint(toy_vit.with_values({"model.depth": 3})) != recipes.recipe_fingerprint(toy_vit)
    assert toy_vit.with_values({"model.name": "small-cnn"}).model.settings == {}
    assert toy_vit.trust_option == ""
    with pytest.raises(UsageError, match=r"unknown recipe key 'model.depth'"):
        toy_vit.with_values({"model.name": "small-cnn", "model.depth": 3})


@pytest.fixture
def toy_vit():
    values = {"training.epochs": 1, "training.batch_size": 16, "training.probe": 10, "engine.device": "cpu"}
    return recipes.load("digits-small-cnn-atas").with_values(VIT | values)


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(50, 1, 8, 8, generator=generator), torch.arange(50) % 3
    return atas.data.from_arrays("noise", x, y, x[:20], y[:20])


@pytest.mark.slow
def test_a_run_of_a_stand_in_is_loaded_by_its_name(stand_in, data, toy_vit, tmp_path, monkeypatch):
    recipe = toy_vit.with_values({"model.name": "timm:vit", "model.width": 6})
    run = atas.train(recipe, out=tmp_path / "run", data=data)
    again = atas.load(tmp_path / "run" / "model.safetensors")
    assert isinstance(again, TimmNetwork)
    assert again.timm.size == (8, 8)
    for name, value in run.model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)
    out = atas.export.write(tmp_path / "run", "safetensors")
    assert "pip install 'atas[timm]'" in (out.folder / "README.md").read_text()
    with pytest.raises(UsageError, match=r"is not built in \(timm:vit\).*; use --to safetensors$"):
        atas.export.write(tmp_path / "run", "robustbench")
    tuned = recipe.with_values({"model.weights": str(tmp_path / "run"), "schedule.peak": 1e-12})
    start = atas.train(tuned, out=tmp_path / "tuned", data=data).model
    torch.testing.assert_close(start.timm.head.weight, run.model.timm.head.weight)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UsageError, match="needs timm; install it"):
        atas.load(tmp_path / "run" / "model.safetensors")


@pytest.fixture
def real_timm():
    """The package itself; it imports torchvision, which may not fit this torch."""
    try:
        import timm
    except Exception as error:
        pytest.skip(f"timm cannot be imported: {error}")
    return timm


@pytest.mark.slow
@pytest.mark.parametrize("method", ["atas", "fgsm-ga", "yopo", "free"])
def test_a_vision_transformer_trains(real_timm, method, data, toy_vit, tmp_path):
    values = {"method.name": method, "optimizer.name": "adamw", "optimizer.clip_norm": 1.0, "schedule.peak": 1e-3}
    values |= {"optimizer.decay_norms": False, "method.replays": 2} if method == "free" else {}
    run = atas.train(toy_vit.with_values(values), out=tmp_path / "run", data=data)
    assert run.model.normalize.mean.tolist() == [[[[0.5]]]]
    assert atas.load(tmp_path / "run").timm.patch_embed.img_size == (8, 8)
    result = atas.evaluate(run.model, data.test.images, data.test.labels, atas.Linf(0.1), attacks=("pgd10",))
    assert result.n == 20


@pytest.mark.slow
def test_a_vision_transformer_is_exported(real_timm, data, toy_vit, tmp_path):
    pytest.importorskip("onnx", reason="onnx is not installed")
    atas.train(toy_vit, out=tmp_path / "run", data=data)
    for target in ("safetensors", "torch-export", "onnx"):
        assert atas.export.write(tmp_path / "run", target).difference < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "convnext_atto"])
def test_networks_of_convolutions(real_timm, name):
    model = models.create(f"timm:{name}", 10, 3, size=(32, 32)).eval()
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 10)
    bare = real_timm.create_model(name, num_classes=10)
    model.load_state_dict(bare.state_dict())
    x = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(model(x), bare.eval()(model.normalize(x)))
