"""The layer between pixels and the network."""

import pytest
import torch
import torch.nn.functional as F

from atas import models
from atas.errors import UsageError
from atas.models import Normalize

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.mark.parametrize(
    ("channels", "mean", "std", "expected"),
    [
        (3, None, None, IMAGENET),
        (1, None, None, ((0.5,), (0.25,))),
        (4, None, None, ((0.5,) * 4, (0.25,) * 4)),
        (3, 0, 1, ((0.0,) * 3, (1.0,) * 3)),
        (3, 0.1, None, ((0.1,) * 3, IMAGENET[1])),
        (2, [0.1, 0.2], torch.tensor([0.3, 0.4]), ((0.1, 0.2), (0.3, 0.4))),
    ],
)
def test_equals_the_formula(channels, mean, std, expected):
    x = torch.rand(2, channels, 5, 4)
    out = Normalize(channels, mean, std)(x)
    for c in range(channels):
        torch.testing.assert_close(out[:, c], (x[:, c] - expected[0][c]) / expected[1][c])


def test_input_gradient_is_scaled_by_one_over_std():
    std = (0.1, 0.2, 0.4)
    x = torch.rand(2, 3, 4, 4, requires_grad=True)
    weight = torch.rand(2, 3, 4, 4)
    (Normalize(3, 0.5, std)(x) * weight).sum().backward()
    torch.testing.assert_close(x.grad, weight / torch.tensor(std).view(1, 3, 1, 1))


def test_input_gradient_of_a_model_is_that_of_the_bare_network_over_std():
    torch.manual_seed(0)
    model = models.create("small-cnn", 10, std=(0.1, 0.2, 0.4)).double().eval()
    bare = models.create("small-cnn", 10, mean=0, std=1).double().eval()
    weights = {k: v for k, v in model.state_dict().items() if not k.startswith("normalize.")}
    bare.load_state_dict(weights)
    x = torch.rand(2, 3, 8, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1, 2])
    normalized = model.normalize(x).detach().requires_grad_()
    (through,) = torch.autograd.grad(F.cross_entropy(model(x), labels), x)
    (inside,) = torch.autograd.grad(F.cross_entropy(bare(normalized), labels), normalized)
    assert through.abs().min() > 0
    torch.testing.assert_close(through, inside / model.normalize.std)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_dtype_of_the_input_is_kept(dtype):
    assert Normalize(3)(torch.rand(2, 3, 4, 4, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_last_is_kept(channels):
    x = torch.rand(2, channels, 5, 4).to(memory_format=torch.channels_last)
    for layer in (Normalize(channels), Normalize(channels).to(memory_format=torch.channels_last)):
        out = layer(x)
        assert out.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(out, layer(x.contiguous()))


def test_constants_are_saved_and_loaded():
    source, target = Normalize(3, 0.1, 0.2), Normalize(3)
    assert set(source.state_dict()) == {"mean", "std"}
    target.load_state_dict(source.state_dict())
    assert torch.equal(target.mean, source.mean)
    assert torch.equal(target.std, source.std)


def test_absent_constants_stay_as_they_are():
    layer = Normalize(3, 0.1, 0.2)
    layer.load_state_dict({}, strict=True)
    torch.testing.assert_close(layer.mean.flatten(), torch.full((3,), 0.1))
    torch.testing.assert_close(layer.std.flatten(), torch.full((3,), 0.2))


def test_constants_of_another_shape_or_name_are_not_loaded():
    layer = Normalize(3)
    with pytest.raises(RuntimeError, match="size mismatch for mean"):
        layer.load_state_dict({"mean": torch.zeros(1, 1, 1, 1)})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        layer.load_state_dict({"scale": torch.zeros(3)})


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.rand(2, 1, 8, 8), r"\(2, 1, 8, 8\) do not fit .* \(N, 3, H, W\)"),
        (torch.rand(3, 8, 8), r"\(3, 8, 8\) do not fit"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), "torch.uint8; divide by 255"),
    ],
)
def test_other_images_are_refused(x, message):
    with pytest.raises(UsageError, match=message):
        Normalize(3)(x)
