"""Which networks can compute with weights in channels_last, and what happens to the others."""

import types

import pytest
import torch
from torch import nn

import atas
from atas.evaluation import cuda_backend, evaluate
from atas.ops.networks import channels_last, takes_channels_last
from atas.ops.precision import low_precision_copy
from atas.training.cuda_graph_engine import lay_out


class Viewing(nn.Module):
    """LeNet's usual end: `view` behind a convolution."""

    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(channels, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
        self.fc = nn.Linear(256, 3)

    def forward(self, x):
        x = self.conv(x)
        return self.fc(x.view(len(x), -1))


class Striding(Viewing):
    """Reads its own activations by strides that it assumes: other numbers, no error."""

    def forward(self, x):
        x = self.conv(x)
        return self.fc(torch.as_strided(x, (len(x), 256), (256, 1)))


class Patches(nn.Module):
    """A network without convolutions that needs contiguous images."""

    def __init__(self, channels):
        super().__init__()
        self.fc = nn.Linear(channels * 64, 3)

    def forward(self, x):
        return self.fc(x.view(len(x), -1))


def pooling(channels):
    layers = nn.Conv2d(channels, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(4, 3))


def flattening(channels):
    return nn.Sequential(nn.Conv2d(channels, 4, 3), nn.MaxPool2d(2), nn.Dropout(), nn.Flatten(), nn.Linear(36, 3))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("make", "takes"),
    [(Viewing, False), (Striding, False), (Patches, True), (pooling, True), (flattening, True)],
)
def test_a_network_is_asked(make, takes, channels):
    model = make(channels).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert takes_channels_last(model, torch.empty(2, channels, 8, 8)) is takes
    assert model.training
    for name, value in model.state_dict().items():
        assert value.stride() == before[name].stride()
        assert torch.equal(value, before[name])


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_layers_that_compute_their_weights_can_be_copied():
    """The weight of the last pass is an attribute, with a history after a pass with gradients."""
    model = nn.Sequential(nn.utils.weight_norm(nn.Conv2d(3, 4, 3)), pooling(4))
    images = torch.rand(2, 3, 8, 8)
    model(images)
    assert takes_channels_last(model, images)
    low_precision_copy(model, torch.bfloat16)


@pytest.mark.parametrize(("make", "takes"), [(Viewing, False), (Patches, False), (pooling, True)])
def test_images_in_channels_last_are_asked_about_too(make, takes):
    images = torch.empty(2, 3, 8, 8).to(memory_format=torch.channels_last)
    assert takes_channels_last(make(3), images) is takes


def test_networks_with_kernels_are_not_tried(monkeypatch):
    monkeypatch.setattr(atas.models.PreActResNet, "forward", lambda self, x: pytest.fail("a pass was made"))
    model = atas.models.create("preact-resnet18", 10)
    assert takes_channels_last(model, torch.empty(2, 3, 32, 32))


@pytest.mark.parametrize(("make", "takes"), [(Viewing, False), (pooling, True)])
def test_the_engine_keeps_the_layout_of_a_network_that_needs_it(make, takes):
    recipe = atas.recipes.load("digits-small-cnn-atas")
    loader = types.SimpleNamespace(images=torch.zeros(4, 3, 8, 8, dtype=torch.uint8))
    model, said = make(3), []
    assert lay_out(model, recipe, loader, said.append) is model
    assert len(said) == (not takes)
    assert all(weight.is_contiguous() for weight in model.parameters()) is not takes
    model(torch.rand(2, 3, 8, 8))


@pytest.mark.parametrize(("make", "takes"), [(Viewing, False), (Patches, False), (pooling, True)])
def test_a_search_uses_the_layout_that_the_network_takes(make, takes):
    said = []
    layout = cuda_backend.fastest_layout(make(3), torch.empty(4, 3, 8, 8), said.append)
    assert layout == (torch.channels_last if takes else torch.contiguous_format)
    assert len(said) == (not takes)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("make", [Viewing, Striding, Patches, pooling, flattening])
def test_every_network_is_evaluated_and_trained_on_a_gpu(make, channels, tmp_path):
    torch.manual_seed(0)
    x, y = torch.rand(60, channels, 8, 8), torch.arange(60) % 3
    model = make(channels).cuda()
    result = evaluate(model, x, y, atas.Linf(0.02), attacks=("pgd10", "fab-t"))
    assert result.accuracy["worst"] <= result.accuracy["clean"]
    data = atas.data.from_arrays("noise", x, y, x, y, channels="first")
    values = {"training.epochs": 1, "training.batch_size": 20, "training.probe": 9, "engine.device": "cuda"}
    run = atas.train("digits-small-cnn-atas", model=model, data=data, out=tmp_path, values=values)
    assert len(run.metrics) == 1


def test_weights_keep_their_values():
    model = pooling(3)
    before = [parameter.clone() for parameter in model.parameters()]
    channels_last(model)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert all(map(torch.equal, model.parameters(), before))
