"""The end of a network in one kernel against torch, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import contextlib

import pytest
import torch
from helpers.kernels import DEVICE, ON_GPU

from atas.ops.triton import head


@pytest.mark.parametrize(("width", "side", "classes"), [(64, 4, 10), (96, 5, 2), (128, 3, 37)])
def test_logits_and_gradients(width, side, classes, monkeypatch):
    if not ON_GPU:
        monkeypatch.setattr(head.weight_grad_stream, "run", lambda *inputs: contextlib.nullcontext())
    torch.manual_seed(0)
    active = torch.rand(3, width, side, side, device=DEVICE).to(memory_format=torch.channels_last)
    linear = torch.nn.Linear(width, classes, device=DEVICE)
    gradient = torch.randn(3, classes, device=DEVICE)
    inputs = [active.requires_grad_(), linear.weight, linear.bias]
    expected = linear(active.mean((2, 3)))
    found = head.PoolLinear.apply(*inputs)
    torch.testing.assert_close(found, expected)
    by_hand = torch.autograd.grad(found, inputs, gradient)
    if ON_GPU:
        head.weight_grad_stream.wait()
    torch.testing.assert_close(by_hand, torch.autograd.grad(expected, inputs, gradient))


def test_second_derivatives_are_refused():
    """Also if the incoming gradient itself needs none, as that of a sum: they would be silently zero."""
    active = torch.rand(2, 8, 2, 2, device=DEVICE).to(memory_format=torch.channels_last).requires_grad_()
    weight, bias = torch.randn(3, 8, device=DEVICE), torch.zeros(3, device=DEVICE)
    for loss in (torch.sum, torch.logsumexp):
        logits = head.PoolLinear.apply(active, weight, bias)
        value = loss(logits) if loss is torch.sum else loss(logits, (0, 1))
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(value, active, create_graph=True)
