"""PreActResNet-18 against its definition, written here a second time."""

import math

import pytest
import torch

from atas import models
from atas.ops.networks import has_kernels

# Name: normalisation, whether the projecting shortcut sees the activated input, and whether a last BatchNorm follows.
VARIANTS = {
    "preact-resnet18": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), False, True),
    "preact-resnet18-ssat": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), True, False),
    "preact-resnet18-yopo": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), True, False),
    "preact-resnet18-gradalign": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0), False, False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_forward_and_input_gradient_equal_an_independent_computation(functional, name):
    mean, std, activated_shortcut, last_bn = VARIANTS[name]
    torch.manual_seed(0)
    model = models.create(name, 10)
    net = functional(model)
    x = torch.rand(2, 3, 32, 32, dtype=torch.float64, requires_grad=True)

    out = net.conv("conv1", net.normalize(x, mean, std), padding=1)
    for stage in (1, 2, 3, 4):
        for block in (0, 1):
            part = f"layer{stage}.{block}"
            stride = 2 if stage > 1 and block == 0 else 1
            raw, activated = out, net.bn_relu(f"{part}.bn1", out)
            out = net.conv(f"{part}.conv1", activated, stride, padding=1)
            out = net.conv(f"{part}.conv2", net.bn_relu(f"{part}.bn2", out), padding=1)
            assert (f"{part}.shortcut" in net) == (stride == 2)
            shortcut = activated if activated_shortcut else raw
            out = out + (net.conv(f"{part}.shortcut", shortcut, stride) if stride == 2 else raw)
    assert out.shape == (2, 512, 4, 4)
    assert ("bn" in net) == last_bn
    expected = net.head(net.bn_relu("bn", out) if last_bn else out)

    # The constants are stored in float32, hence the tolerance.
    logits = model(x)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
    gradient, expected = (torch.autograd.grad(part[:, 3].sum(), x)[0] for part in (logits, expected))
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6 * expected.abs().max().item())


@pytest.mark.parametrize("name", VARIANTS)
def test_networks_of_other_methods_have_their_authors_normalisation_unless_told_otherwise(name):
    mean, std, *_ = VARIANTS[name]
    own = models.create(name, 10).normalize
    assert own.mean.flatten().tolist() == pytest.approx(mean)
    assert own.std.flatten().tolist() == pytest.approx(std)
    other = models.create(name, 10, mean=0.5, std=0.25).normalize
    assert (other.mean.unique().tolist(), other.std.unique().tolist()) == ([0.5], [0.25])
    grey = models.create(name, 10, channels=1).normalize
    assert (grey.mean.item(), grey.std.item()) == (0.5, 0.25)


def test_the_network_of_gradalign_starts_with_he_normal_weights():
    torch.manual_seed(0)
    state = models.create("preact-resnet18-gradalign", 10).state_dict()
    for name in ("layer1.0.conv1.weight", "layer4.1.conv2.weight", "layer3.0.shortcut.weight"):
        fan_out = state[name].shape[0] * state[name][0, 0].numel()
        assert state[name].std() == pytest.approx(math.sqrt(2 / fan_out), rel=0.03)
        assert state[name].abs().max() > 3 * state[name].std()  # normal, not uniform
    assert state["fc.weight"].std() == pytest.approx(math.sqrt(2 / 512), rel=0.03)
    assert not state["fc.bias"].any()


@pytest.mark.parametrize("name", VARIANTS)
def test_only_the_networks_of_the_kernels_run_by_kernels(name):
    assert has_kernels(models.create(name, 10)) == (name == "preact-resnet18")


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
