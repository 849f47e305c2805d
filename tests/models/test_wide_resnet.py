"""Wide ResNets against their definition, written here a second time."""

import math

import pytest
import torch

from atas import models
from atas.models.wide_resnet import WideResNet


@pytest.mark.parametrize(("depth", "width"), [(10, 2), (16, 1), (22, 3)])
def test_forward_equals_an_independent_computation(functional, depth, width):
    torch.manual_seed(0)
    model = WideResNet(10, models.Normalize(1), depth, width)
    net = functional(model)
    x = torch.rand(2, 1, 16, 16, dtype=torch.float64)

    out = net.conv("conv1", net.normalize(x, 0.5, 0.25), padding=1)
    for stage in (1, 2, 3):
        for block in range((depth - 4) // 6):
            name = f"layer{stage}.{block}"
            stride = 2 if stage > 1 and block == 0 else 1
            changes_width = block == 0 and (stage > 1 or width > 1)
            raw, activated = out, net.bn_relu(f"{name}.bn1", out)
            out = net.conv(f"{name}.conv1", activated, stride, padding=1)
            out = net.conv(f"{name}.conv2", net.bn_relu(f"{name}.bn2", out), padding=1)
            assert (f"{name}.shortcut" in net) == changes_width
            out = out + (net.conv(f"{name}.shortcut", activated, stride) if changes_width else raw)
    assert out.shape == (2, 64 * width, 4, 4)
    torch.testing.assert_close(model(x), net.head(net.bn_relu("bn", out)))


def test_wrn_28_10_is_28_deep_and_10_wide():
    with torch.device("meta"):
        shapes = {k: tuple(v.shape) for k, v in models.create("wrn-28-10", 10).state_dict().items()}
    convolutions = [k for k, v in shapes.items() if len(v) == 4 and k.endswith("weight")]
    on_the_main_path = [k for k in convolutions if "shortcut" not in k]
    assert len(on_the_main_path) == 1 + 3 * 4 * 2
    assert len(convolutions) - len(on_the_main_path) == 3
    assert shapes["conv1.weight"] == (16, 3, 3, 3)
    assert [shapes[f"layer{i}.3.conv2.weight"][0] for i in (1, 2, 3)] == [160, 320, 640]


def test_initial_weights():
    torch.manual_seed(0)
    state = WideResNet(10, models.Normalize(3), depth=10, width=4).state_dict()
    for name, fan_out in (
        ("layer1.0.conv1.weight", 9 * 64),
        ("layer3.0.conv2.weight", 9 * 256),
        ("layer2.0.shortcut.weight", 128),
    ):
        deviation = math.sqrt(2 / fan_out)
        assert abs(state[name].std() / deviation - 1) < 0.03
        assert abs(state[name].mean()) < 0.05 * deviation
        assert state[name].abs().max() > 3 * deviation, "normal, not uniform"
    assert (state["fc.bias"] == 0).all()
    assert 0 < state["fc.weight"].abs().max() <= 1 / math.sqrt(256)
    for name, value in state.items():
        if ".bn" in name or name.startswith("bn."):
            expected = 1 if name.endswith(("weight", "running_var")) else 0
            assert (value == expected).all(), name
