"""The slope of the loss along a direction, against autograd through its own backward pass."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from atas.core.autograd import cross_entropy_sum, gradient_penalty
from atas.models import Normalize, PreActResNet, WideResNet
from atas.ops.jvp import loss_jvp


def make(kind: str, window: int | None = None) -> nn.Module:
    torch.manual_seed(0)
    normalize = Normalize(3, (0.3, 0.4, 0.5), (0.2, 0.3, 0.4))
    model = PreActResNet(5, normalize) if kind == "preact" else WideResNet(5, normalize, 10, 2)
    model.window = window
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    return model.double().train()


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(4, 3, 16, 16, dtype=torch.float64, generator=generator)
    direction = torch.randn(x.shape, dtype=torch.float64, generator=generator)
    return x, direction, torch.tensor([0, 3, 4, 1])


def by_weights(model: nn.Module, value: torch.Tensor) -> list[torch.Tensor]:
    weights = list(model.parameters())
    found = torch.autograd.grad(value, weights, allow_unused=True)
    return [torch.zeros_like(weight) if one is None else one for one, weight in zip(found, weights, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "window"), [("preact", None), ("wide", None), ("wide", 3)])
def test_value_and_derivative_are_those_of_two_backward_passes(kind, window):
    model, (x, direction, y) = make(kind, window), batch()
    found = loss_jvp(model, x, direction, y)
    z = x.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(z), y, reduction="sum"), z, create_graph=True)
    expected = (gradient * direction).sum()
    torch.testing.assert_close(found, expected, atol=0, rtol=1e-10)
    for ours, theirs in zip(by_weights(model, found), by_weights(model, expected), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=1e-9)


def test_running_statistics_stay():
    model, (x, direction, y) = make("wide"), batch()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    loss_jvp(model, x, direction, y)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


class WithJvp(nn.Module):
    """A model that has no second derivative, but a JVP."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.calls = model, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Once.apply(self.model(x))

    def loss_jvp(self, x: torch.Tensor, direction: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return loss_jvp(self.model, x, direction, y)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return gradient


def test_a_gradient_penalty_by_jvp_is_that_of_two_backward_passes():
    model, (x, other, y) = make("wide"), batch()
    results = []
    for network in (model, with_jvp := WithJvp(model)):
        value = gradient_penalty(
            network, x, y, cross_entropy_sum, lambda gradient: F.cosine_similarity(gradient, other).square().sum()
        )
        results.append([value.detach(), *by_weights(model, value)])
    assert with_jvp.calls == 1
    for plain, fast in zip(*results, strict=True):
        torch.testing.assert_close(fast, plain, atol=1e-11, rtol=1e-9)
    assert all(weight.requires_grad for weight in model.parameters())
