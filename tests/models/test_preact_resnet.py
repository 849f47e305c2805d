"""PreActResNet-18 against its definition, written here a second time."""

import math

import pytest
import torch

from atas import models

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.mark.slow
def test_forward_equals_an_independent_computation(functional):
    torch.manual_seed(0)
    model = models.create("preact-resnet18", 10)
    net = functional(model)
    x = torch.rand(2, 3, 32, 32, dtype=torch.float64)

    out = net.conv("conv1", net.normalize(x, MEAN, STD), padding=1)
    for stage in (1, 2, 3, 4):
        for block in (0, 1):
            name = f"layer{stage}.{block}"
            stride = 2 if stage > 1 and block == 0 else 1
            raw = out
            out = net.conv(f"{name}.conv1", net.bn_relu(f"{name}.bn1", raw), stride, padding=1)
            out = net.conv(f"{name}.conv2", net.bn_relu(f"{name}.bn2", out), padding=1)
            assert (f"{name}.shortcut" in net) == (stride == 2)
            out = out + (net.conv(f"{name}.shortcut", raw, stride) if stride == 2 else raw)
    assert out.shape == (2, 512, 4, 4)
    expected = net.head(net.bn_relu("bn", out))

    # The constants are stored in float32, hence the tolerance.
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)


def test_initial_weights_are_pytorchs_defaults():
    torch.manual_seed(0)
    state = models.create("preact-resnet18", 10).state_dict()
    for name in ("layer1.0.conv1.weight", "layer4.1.conv2.weight", "layer3.0.shortcut.weight", "fc.weight"):
        bound = 1 / math.sqrt(state[name][0].numel())
        assert 0.95 * bound < state[name].abs().max() <= bound
        assert abs(state[name].std() / (bound / math.sqrt(3)) - 1) < 0.03
    assert 0 < state["fc.bias"].abs().max() <= 1 / math.sqrt(512)
    assert all((v == 1).all() for k, v in state.items() if k.endswith("bn1.weight") or k == "bn.weight")


def test_there_is_no_normalisation_in_the_stem_or_the_shortcuts():
    names = models.create("preact-resnet18", 10).state_dict()
    assert {name.split(".")[0] for name in names} == {
        *("normalize", "conv1", "layer1", "layer2", "layer3", "layer4", "bn", "fc")
    }
    assert [name for name in names if "shortcut" in name] == [f"layer{stage}.0.shortcut.weight" for stage in (2, 3, 4)]
