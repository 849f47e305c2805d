"""ResNet-18 and ResNet-50 against torchvision's published layout, written here as a small specification."""

import math

import pytest
import torch
import torch.nn.functional as F

from atas import models
from atas.models.resnet import Stem

# Blocks of each stage; kernel sizes in a block; how much wider than the stage its last convolution is.
LAYOUTS = {"resnet18": ((2, 2, 2, 2), (3, 3), 1), "resnet50": ((3, 4, 6, 3), (1, 3, 1), 4)}
# Position of the convolution with the stride: the 3x3 one, which makes ResNet-50 a v1.5.
STRIDED = {"resnet18": 1, "resnet50": 2}


def batch_norm(name, width):
    yield from ((f"{name}.{key}", (width,)) for key in ("weight", "bias", "running_mean", "running_var"))
    yield f"{name}.num_batches_tracked", ()


def published_layout(name, num_classes):
    """Names and shapes in the order of the published files."""
    blocks, kernels, expansion = LAYOUTS[name]
    yield "conv1.weight", (64, 3, 7, 7)
    yield from batch_norm("bn1", 64)
    incoming = 64
    for stage, count in enumerate(blocks, start=1):
        width = 32 * 2**stage
        for block in range(count):
            prefix, into = f"layer{stage}.{block}", incoming
            for i, kernel in enumerate(kernels, start=1):
                out = width * expansion if i == len(kernels) else width
                yield f"{prefix}.conv{i}.weight", (out, into, kernel, kernel)
                yield from batch_norm(f"{prefix}.bn{i}", out)
                into = out
            if block == 0 and (stage > 1 or expansion > 1):
                yield f"{prefix}.downsample.0.weight", (into, incoming, 1, 1)
                yield from batch_norm(f"{prefix}.downsample.1", into)
            incoming = into
    yield "fc.weight", (num_classes, incoming)
    yield "fc.bias", (num_classes,)


@pytest.mark.parametrize(("name", "entries"), [("resnet18", 122), ("resnet50", 320)])
def test_state_dict_is_torchvisions_and_normalize(name, entries):
    with torch.device("meta"):
        state = models.create(name, 1000).state_dict()
    ours = [(k, tuple(v.shape)) for k, v in state.items() if not k.startswith("normalize.")]
    assert len(ours) == entries
    assert ours == list(published_layout(name, 1000))
    assert set(state) - {k for k, _ in ours} == {"normalize.mean", "normalize.std"}


@pytest.mark.parametrize(("name", "count"), [("resnet18", 11_689_512), ("resnet50", 25_557_032)])
def test_the_number_of_weights_is_the_published_one(name, count):
    with torch.device("meta"):
        assert sum(weight.numel() for weight in models.create(name, 1000).parameters()) == count


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_published_weights_load_strictly(name):
    model = models.create(name, 1000)
    weights = {key: torch.full(shape, 0.25) for key, shape in published_layout(name, 1000)}
    model.load_state_dict(weights, strict=True)
    assert (model.fc.weight == 0.25).all()
    torch.testing.assert_close(model.normalize.mean.flatten(), torch.tensor([0.485, 0.456, 0.406]))


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_forward_equals_an_independent_computation(functional, name):
    torch.manual_seed(0)
    model = models.create(name, 5, channels=1)
    net = functional(model)
    x = torch.rand(1, 1, 65, 65, dtype=torch.float64)

    blocks, kernels, _ = LAYOUTS[name]
    out = net.conv("conv1", net.normalize(x, 0.5, 0.25), stride=2, padding=3)
    out = F.max_pool2d(net.bn_relu("bn1", out), 3, stride=2, padding=1)
    assert out.shape[2:] == (17, 17)
    for stage, count in enumerate(blocks, start=1):
        for block in range(count):
            prefix, raw = f"layer{stage}.{block}", out
            stride = 2 if stage > 1 and block == 0 else 1
            for i, kernel in enumerate(kernels, start=1):
                step = stride if i == STRIDED[name] else 1
                out = net.bn(f"{prefix}.bn{i}", net.conv(f"{prefix}.conv{i}", out, step, kernel // 2))
                if i < len(kernels):
                    out = F.relu(out)
            if f"{prefix}.downsample.0" in net:
                raw = net.bn(f"{prefix}.downsample.1", net.conv(f"{prefix}.downsample.0", raw, stride))
            out = F.relu(out + raw)
    torch.testing.assert_close(model(x), net.head(out))


def test_initial_weights():
    torch.manual_seed(0)
    state = models.create("resnet18", 1000).state_dict()
    for name, fan_out in (
        ("conv1.weight", 49 * 64),
        ("layer4.0.conv1.weight", 9 * 512),
        ("layer3.0.downsample.0.weight", 256),
    ):
        deviation = math.sqrt(2 / fan_out)
        assert abs(state[name].std() / deviation - 1) < 0.03
        assert state[name].abs().max() > 3 * deviation, "normal, not uniform"
    assert 0 < state["fc.bias"].abs().max() <= 1 / math.sqrt(512)
    assert (state["layer1.1.bn2.weight"] == 1).all()


@pytest.mark.parametrize("shape", [(2, 3, 16, 20), (1, 1, 8, 8), (2, 4, 224, 32)])
def test_the_folded_stem_is_the_stem(shape):
    """Its output, and the gradients by its input and its weight."""
    torch.manual_seed(0)
    stem = Stem(shape[1], 8).double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    plain, folded = stem(x), stem.folded(x)
    above = torch.randn_like(plain)
    torch.testing.assert_close(folded, plain)
    found, expected = (torch.autograd.grad(y, [x, stem.weight], above) for y in (folded, plain))
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("side", [64, 65])
def test_the_stem_on_a_gpu(side):
    """Folded where it can be, and as it is where a side is odd."""
    stem, x = Stem(3, 64), torch.rand(2, 3, side, side)
    expected = stem(x)
    with torch.backends.cudnn.flags(allow_tf32=False):
        torch.testing.assert_close(stem.cuda()(x.cuda()).cpu(), expected, atol=1e-5, rtol=1e-4)
