"""The released evaluation: padded images, and a pooling that sees the upper left alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from atas import data, models
from atas.core.fingerprint import weights_hash
from atas.sweeps.execute import held_out_as_test
from atas.sweeps.padded_evaluation import pad_split, with_released_pooling


def authors(model, x, side):
    """The last layers as the authors' networks have them: an average pool of stride `side`, then a flattening."""
    stages = [stage for name, stage in model.named_children() if name.startswith("layer")]
    x = model.conv1(model.normalize(x))
    x = F.relu(model.bn(nn.Sequential(*stages)(x)))
    return model.fc(F.avg_pool2d(x, side).flatten(1))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "side"), [("preact-resnet18", 4), ("wrn-28-10", 8)])
def test_a_network_on_padded_images_is_the_authors(name, side):
    model = models.create(name, 10).eval() if name != "wrn-28-10" else models.WideResNet(10, models.Normalize(3), 10, 1)
    model.eval()
    x = torch.rand(2, 3, 40, 40)
    with torch.no_grad():
        expected, found = authors(model, x, side), with_released_pooling(model)(x)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert (found - model(x)).abs().max() > 1e-4, "the window matters"
        torch.testing.assert_close(
            with_released_pooling(model)(x[..., :32, :32]), model(x[..., :32, :32]), rtol=1e-5, atol=1e-6
        )
    assert model.window is None, "the model itself stays as it was"
    assert weights_hash(with_released_pooling(model)) == weights_hash(model)


def test_other_networks_stay_as_they_are():
    model = models.create("small-cnn", 10)
    assert with_released_pooling(model) is model


def test_padding_is_black_on_all_sides():
    split = data.load("digits").test
    wide = pad_split(split, 4)
    assert wide.images.shape[1:] == (1, 16, 16)
    assert torch.equal(wide.images[..., 4:12, 4:12], split.images)
    assert wide.images.sum() == split.images.sum()
    assert pad_split(split, 0) is split


def test_held_out_images_are_not_trained_on():
    digits = data.load("digits")
    part = held_out_as_test(digits, 300)
    assert (len(part.train), len(part.test)) == (997, 300)
    both = torch.cat([part.train.images, part.test.images]).flatten(1)
    assert torch.equal(both.sum(0), digits.train.images.flatten(1).sum(0))
    again = held_out_as_test(digits, 300)
    assert torch.equal(part.test.images, again.test.images)
