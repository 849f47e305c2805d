"""Where YOPO may split a network: its steps follow the gradient of the loss, or it says why not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import atas
from atas.core.autograd import input_gradient
from atas.core.split_model import HookedSplit
from atas.errors import UsageError

SHAPE = (3, 8, 8)


class TwoStreams(nn.Module):
    def __init__(self):
        super().__init__()
        self.fine, self.coarse, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 5), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(torch.cat([self.fine(x).relu().mean((2, 3)), self.coarse(x).relu().mean((2, 3))], 1))


class Transformer(nn.Module):
    """A small network decides how the image is turned."""

    def __init__(self):
        super().__init__()
        self.where, self.conv, self.head = nn.Linear(192, 6), nn.Conv2d(3, 4, 3), nn.Linear(4, 4)

    def forward(self, x):
        grid = F.affine_grid(self.where(x.flatten(1)).view(-1, 2, 3) * 0.1, list(x.shape), align_corners=False)
        seen = F.grid_sample(x, grid, align_corners=False)
        return self.head(self.conv(seen).relu().mean((2, 3)))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(3, 4)

    def forward(self, x):
        return self.head(self.conv(self.conv(x).relu()).relu().mean((2, 3)))


class Residual(nn.Module):
    """Everything goes through the stem, but not through the layer that is registered first."""

    def __init__(self):
        super().__init__()
        self.branch, self.stem, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(3, 4, 3), nn.Linear(4, 4)

    def forward(self, x):
        x = self.stem(x - 0.5).relu()
        return self.head((x + self.branch(x)).mean((2, 3)))


def step(model, make_images, **options):
    method = atas.methods.create("yopo", atas.Linf(8 / 255), 8, SHAPE, outer=2, inner=2, **options)
    method.start_epoch(0, 2)
    return method.step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), make_images(8, SHAPE), torch.arange(8) % 4, torch.arange(8)
    )


REFUSED = [
    (TwoStreams, "'fine' alone, because the network also sees the images past it"),
    (Transformer, "'where' alone, because the network also sees the images past it"),
    (Twice, "'conv' alone, because a pass uses it 2 times"),
    (Residual, "'branch' alone, because the network also sees the images past it"),
]


@pytest.mark.parametrize(("network", "said"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_a_layer_that_is_not_the_only_way_in_is_refused(network, said, make_images):
    model = network()
    before = [weight.clone() for weight in model.parameters()]
    for _ in range(2):
        with pytest.raises(UsageError, match=said) as caught:
            step(model, make_images)
        assert "\n" not in str(caught.value)
    assert all(torch.equal(old, weight) for old, weight in zip(before, model.parameters(), strict=True))
    assert all(weight.grad is None for weight in model.parameters())


def test_another_layer_can_be_named(make_images):
    assert step(Residual(), make_images, layer="stem").loss.isfinite()
    with pytest.raises(UsageError, match="'branch' alone"):
        step(Residual(), make_images, layer="branch")


@pytest.mark.parametrize("layer", [None, "bn1", "conv1"])
def test_the_steps_follow_the_gradient_of_the_loss(small_net, make_images, layer):
    model, x, y = small_net().eval(), make_images(8, SHAPE), torch.arange(8) % 4
    split = HookedSplit(model, layer)
    logits, output = split.forward(x)
    (adjoint,) = torch.autograd.grad(F.cross_entropy(logits, y, reduction="sum"), output)
    torch.testing.assert_close(split.first_layer_vjp(adjoint, x), input_gradient(model, x, y)[0])


def test_a_layer_is_checked_once_a_model(small_net, make_images, monkeypatch):
    model, calls = small_net(), []
    monkeypatch.setattr("atas.core.split_model.depends_on", lambda *_, **__: calls.append(1))
    for layer in (None, None, "bn1"):
        step(model, make_images, layer=layer)
    assert len(calls) == 2


def test_networks_without_layers_to_find_are_refused(small_net, make_images):
    for model in (torch.compile(small_net(), backend="eager"), torch.jit.script(nn.Sequential(nn.Linear(8, 4)))):
        with pytest.raises(UsageError, match=r"needs hooks .* pass the network that it was made from"):
            step(model, make_images)


def test_a_layer_that_returns_more_than_a_tensor_is_refused(make_images):
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows, self.head = nn.GRU(24, 5, batch_first=True), nn.Linear(5, 4)

        def forward(self, x):
            return self.head(self.rows(x.transpose(1, 2).flatten(2))[0][:, -1])

    with pytest.raises(UsageError, match="a layer that returns a tuple"):
        step(Rows(), make_images, layer="rows")
