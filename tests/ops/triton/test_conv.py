"""Convolutions with BatchNorm and ReLU in one kernel against torch, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.kernels import DEVICE, HALF
from torch import nn

from atas.ops.triton import conv as conv_kernels
from atas.ops.triton import conv_tiling

#        images, in, out, side, stride, kernel
CASES = [
    (3, 64, 64, 32, 1, 3),
    (9, 128, 128, 8, 1, 3),
    (9, 64, 128, 4, 1, 3),
    (3, 160, 160, 16, 1, 3),
    (2, 160, 320, 16, 2, 3),
    (3, 64, 128, 16, 2, 3),
    (2, 64, 128, 16, 2, 1),
    (3, 64, 64, 12, 1, 3),  # sides that are no power of two
    (9, 64, 128, 5, 1, 3),
    (3, 160, 160, 10, 1, 3),
    (3, 64, 128, 20, 2, 3),
    (5, 64, 128, 12, 2, 1),
]
CUT_AS_LARGE = [(2, 64, 64, 32, 1, 3), (3, 320, 320, 8, 1, 3), (2, 640, 64, 8, 1, 3)]


class Case:
    def __init__(self, images, inner, outer, side, stride, kernel):
        torch.manual_seed(0)
        self.conv = nn.Conv2d(inner, outer, kernel, stride, padding=kernel // 2, bias=False)
        self.conv = self.conv.to(DEVICE, HALF, memory_format=torch.channels_last)
        self.x = self.random(images, inner, side)
        self.other = self.random(images, outer, side // stride)
        self.gradient = self.random(images, outer, side // stride)
        self.past = self.random(images, inner, side)

    def random(self, images, channels, side):
        made = torch.randn(images, channels, side, side, device=DEVICE)
        return made.to(HALF, memory_format=torch.channels_last)

    def bn(self, columns, training):
        bn = nn.BatchNorm2d(columns).to(DEVICE).train(training)
        for tensor, low in ((bn.weight, 0.5), (bn.running_var, 0.5), (bn.bias, -0.5), (bn.running_mean, -0.5)):
            tensor.data.uniform_(low, low + 1)
        return bn


def close(found, expected, tolerance=0.02):
    found, expected = found.detach().double(), expected.detach().double()
    assert (found - expected).norm() <= tolerance * expected.norm()


def saved_of(total, bn):
    total = total.detach()
    mean, variance = total.mean((0, 2, 3)), total.var((0, 2, 3), unbiased=False)
    deviation = (variance + bn.eps).rsqrt()
    return torch.stack([mean, deviation, bn.weight * deviation, bn.bias - mean * bn.weight * deviation]).detach()


@pytest.fixture(params=[*CASES, *CUT_AS_LARGE], ids=str)
def case(request, monkeypatch):
    if request.param in CUT_AS_LARGE:  # by the tiles of batches that fill a GPU
        monkeypatch.setattr(conv_tiling, "MIN_PROGRAMS", 1)
    return Case(*request.param)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_forward(case, adds, training):
    assert conv_tiling.supports(case.conv, case.x)
    bn = case.bn(case.conv.out_channels, training)
    statistics = bn.running_mean.clone(), bn.running_var.clone()
    total = F.conv2d(case.x.float(), case.conv.weight.float(), None, case.conv.stride, case.conv.padding)
    total = total + case.other if adds else total
    expected = F.relu(F.batch_norm(total, *statistics, bn.weight, bn.bias, training=training, momentum=0.1))
    if training:
        found, active, _ = conv_kernels.forward_train(case.x, case.conv, case.other if adds else None, bn)
    else:
        found, active = conv_kernels.forward_eval(case.x, case.conv, case.other if adds else None, bn)
    if training or adds:
        close(found, total)
    close(active, expected)
    close(bn.running_mean, statistics[0], 1e-3)
    close(bn.running_var, statistics[1], 1e-3)


@pytest.mark.parametrize(
    "channels", [(64, 128, 8), (160, 320, 8), (256, 512, 4), (320, 640, 8), (64, 128, 10)], ids=str
)
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("large", [False, True])
def test_forward_with_the_shortcut_of_a_block_that_halves(channels, training, large, monkeypatch):
    if large:
        monkeypatch.setattr(conv_tiling, "MIN_PROGRAMS", 1)
    before, outer, side = channels
    case, shortcut = Case(3, outer, outer, side, 1, 3), Case(3, before, outer, 2 * side, 2, 1)
    assert conv_tiling.supports(shortcut.conv, shortcut.x)
    bn = case.bn(outer, training)
    total = F.conv2d(case.x.float(), case.conv.weight.float(), None, 1, 1)
    total = total + F.conv2d(shortcut.x.float(), shortcut.conv.weight.float(), None, 2)
    statistics = bn.running_mean.clone(), bn.running_var.clone()
    expected = F.relu(F.batch_norm(total, *statistics, bn.weight, bn.bias, training=training, momentum=0.1))
    forward = conv_kernels.forward_train if training else conv_kernels.forward_eval
    found, active, *_ = forward(case.x, case.conv, conv_kernels.Projection(shortcut.x, shortcut.conv), bn)
    close(found, total)
    close(active, expected)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_backward(case, adds, training):
    if not conv_tiling.supports(case.conv, case.x, backward=True):
        pytest.skip("the kernels of strided convolutions take the shortcut with them")
    bn = case.bn(case.conv.in_channels, training)
    weight = case.conv.weight.float()
    total = case.x.float().requires_grad_()
    statistics = bn.running_mean.clone(), bn.running_var.clone()
    active = F.relu(F.batch_norm(total, *statistics, bn.weight, bn.bias, training=training, momentum=0.1))
    out = F.conv2d(active, weight, None, case.conv.stride, case.conv.padding)
    expected = torch.autograd.grad(out, [total, bn.weight, bn.bias], case.gradient.float())
    past = case.past if adds else None
    if training:
        saved = saved_of(total, bn)
        found, by_weight, by_bias = conv_kernels.backward_train(case.gradient, case.conv, case.x, saved, past)
        close(by_weight, expected[1])
        close(by_bias, expected[2])
    else:
        low = active.detach().to(HALF, memory_format=torch.channels_last)
        found = conv_kernels.backward_eval(case.gradient, case.conv, low, past, bn)
    close(found, expected[0] + case.past.float() if adds else expected[0])


@pytest.mark.parametrize("activated", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("side", [16, 20, 10])
def test_backward_through_a_block_that_halves(activated, training, side):
    from atas.ops.triton import conv_stride2

    case = Case(5, 64, 128, side, 2, 3)
    shortcut = Case(5, 64, 128, side, 2, 1).conv
    assert conv_stride2.supports(case.conv, shortcut, case.x)
    bn = case.bn(64, training)
    total = case.x.float().requires_grad_()
    statistics = bn.running_mean.clone(), bn.running_var.clone()
    active = F.relu(F.batch_norm(total, *statistics, bn.weight, bn.bias, training=training, momentum=0.1))
    inner = F.conv2d(active, case.conv.weight.float(), None, 2, 1)
    beyond = F.conv2d(active if activated else total, shortcut.weight.float(), None, 2)
    gradients = [case.gradient.float(), case.other.float()]
    expected = torch.autograd.grad([inner, beyond], [total, bn.weight, bn.bias], gradients)
    ways = case.gradient, case.conv, case.other, shortcut
    if training:
        found, by_weight, by_bias = conv_stride2.backward_train(*ways, case.x, saved_of(total, bn), activated)
        close(by_weight, expected[1])
        close(by_bias, expected[2])
    else:
        low = active.detach().to(HALF, memory_format=torch.channels_last)
        found = conv_stride2.backward_eval(*ways, low, bn, activated)
    close(found, expected[0])
