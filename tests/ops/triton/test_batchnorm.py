"""The kernels of BatchNorm and ReLU against torch, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.kernels import DEVICE

from atas.ops.triton import batchnorm
from atas.ops.triton.batch_statistics import empty_partials, group_counters

SHAPES = [(4, 64, 8, 8), (2, 160, 4, 4), (3, 16, 5, 7), (3, 512, 2, 2)]


@pytest.fixture
def case(request):
    shape = request.param
    torch.manual_seed(0)
    columns = shape[1]
    a, b, gradient, past = (torch.randn(shape, device=DEVICE).to(memory_format=torch.channels_last) for _ in range(4))
    weight, bias = torch.rand(columns, device=DEVICE) + 0.5, torch.randn(columns, device=DEVICE)
    mean, variance = torch.randn(columns, device=DEVICE), torch.rand(columns, device=DEVICE) + 0.5
    return a + 1, b, gradient, past, weight, bias, mean, variance


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("case", SHAPES, indirect=True)
@pytest.mark.parametrize("adds", [False, True])
def test_train_mode(case, adds):
    a, b, gradient, past, weight, bias, mean, variance = case
    x = (a + b if adds else a).clone().requires_grad_()
    parameters = [weight.clone().requires_grad_(), bias.clone().requires_grad_()]
    statistics = [mean.clone(), variance.clone()]
    expected = F.relu(F.batch_norm(x, *statistics, *parameters, training=True, momentum=0.1, eps=1e-5))
    expected.backward(gradient)
    total, out, saved = batchnorm.forward_train(a, b if adds else None, weight, bias, mean, variance, 0.1, 1e-5)
    by_input, by_weight, by_bias = batchnorm.backward_train(total, gradient, past if adds else None, saved)
    close(total, x.detach())
    close(out, expected.detach())
    close(mean, statistics[0])
    close(variance, statistics[1])
    close(by_input, x.grad + past if adds else x.grad)
    close(by_weight, parameters[0].grad)
    close(by_bias, parameters[1].grad)


@pytest.mark.parametrize("case", SHAPES, indirect=True)
@pytest.mark.parametrize("adds", [False, True])
def test_eval_mode(case, adds):
    a, b, gradient, past, weight, bias, mean, variance = case
    x = (a + b if adds else a).clone().requires_grad_()
    expected = F.relu(F.batch_norm(x, mean, variance, weight, bias, training=False, eps=1e-5))
    expected.backward(gradient)
    total, out = batchnorm.forward_eval(a, b if adds else None, weight, bias, mean, variance, 1e-5)
    by_input = batchnorm.backward_eval(out, gradient, past if adds else None, weight, variance, 1e-5)
    close(total, x.detach())
    close(out, expected.detach())
    close(by_input, x.grad + past if adds else x.grad)


def test_the_sums_of_large_batches_have_counters_of_their_own():
    """One for every group of 32 programs; beyond that the counters of the next channels would be used."""
    meta = torch.device("meta")
    tiles = 16_384 * 32 * 32 // 128  # of images of CIFAR-10, 128 pixels each
    assert empty_partials(tiles, 64, meta).shape == (tiles + tiles // 32, 2, 64)
    assert len(group_counters(torch.device("cpu"))) >= 64 * (1 + tiles // 32)
    with pytest.raises(ValueError, match="do not fit their counters; use a smaller batch"):
        empty_partials(2**20, 64, meta)
