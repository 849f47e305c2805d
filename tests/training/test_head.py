"""Given weights in a new model: the head is replaced where its size differs, and everything else must fit."""

from pathlib import Path

import pytest
import torch
from torch import nn

from atas import models
from atas.errors import DataError
from atas.training.initial_weights import load_pretrained

PATH = Path("base.safetensors")


def small(classes, seed=0, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return models.create("small-cnn", classes, 1, **options)


class ConvHead(nn.Module):
    """Ends in a 1x1 convolution."""

    def __init__(self, classes, width=4):
        super().__init__()
        self.body, self.head = nn.Conv2d(1, width, 3), nn.Conv2d(width, classes, 1)

    def forward(self, x):
        return self.head(self.body(x)).mean((2, 3))


def test_weights_that_fit_are_all_taken():
    model, given = small(10), small(10, seed=1).state_dict()
    assert load_pretrained(model, given, PATH) is None
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, given[name])


@pytest.mark.parametrize("make", [small, ConvHead])
def test_the_head_is_replaced(make):
    model, given = make(3), make(10).state_dict()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert load_pretrained(model, given, PATH) == "the head was replaced: 10 -> 3 classes"
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name] if name.startswith(("fc", "head")) else given[name])


def test_constants_and_counts_may_be_absent():
    given = small(10, seed=1, mean=0.1).state_dict()
    plain = {name: value for name, value in given.items() if "normalize" not in name and "num_batches" not in name}
    model = small(10)
    assert load_pretrained(model, plain, PATH) is None
    assert float(model.normalize.mean) == 0.5
    load_pretrained(model, given, PATH, ignore=("normalize.mean", "normalize.std"))
    assert float(model.normalize.mean) == 0.5
    load_pretrained(model, given, PATH)
    assert float(model.normalize.mean) == pytest.approx(0.1)


def test_half_precision_is_widened():
    model, given = small(10), {name: value.half() for name, value in small(10, seed=1).state_dict().items()}
    load_pretrained(model, given, PATH)
    assert model.fc.weight.dtype == torch.float32
    assert torch.equal(model.fc.weight, given["fc.weight"].float())


def without(name):
    return {key: value for key, value in small(10).state_dict().items() if key != name}


def resized(**shapes):
    state = small(10).state_dict()
    return state | {name.replace("_", "."): torch.zeros(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (without("conv2.weight"), "conv2.weight of the network is not in it"),
        (without("fc.weight"), "fc.weight of the network is not in it"),
        (small(10).state_dict() | {"extra": torch.ones(1)}, "the network has no extra"),
        (resized(conv1_weight=(16, 1, 3, 3)), "conv1.weight has shape 16 x 1 x 3 x 3, and in the network 32 x 1 x 3"),
        (resized(fc_weight=(3, 32), fc_bias=(3,)), "fc.weight has shape 3 x 32"),
        (resized(fc_weight=(3, 64)), "fc.weight has shape 3 x 64"),
        (resized(fc_weight=(3, 64), fc_bias=(4,)), "fc.weight has shape 3 x 64"),
        (resized(fc_weight=(3, 64), fc_bias=(3,), bn1_weight=(3,)), "bn1.weight has shape 3"),
        ({}, "are not in it"),
    ],
)
def test_anything_else_is_refused(given, why):
    model = small(10)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(
        DataError, match=r"^the weights of base\.safetensors do not fit the network: .*; choose the"
    ) as e:
        load_pretrained(model, given, PATH)
    assert why in str(e.value)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
