"""The first convolution from pixels against torch, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from helpers.kernels import DEVICE, HALF
from torch import nn

from atas.models import Normalize
from atas.ops.triton import stem


def close(found, expected):
    found, expected = found.detach().double(), expected.detach().double()
    assert (found - expected).norm() <= 0.02 * expected.norm()


@pytest.mark.parametrize("shape", [(5, 3, 16, 16), (3, 1, 8, 12), (2, 4, 9, 7)])
@pytest.mark.parametrize("training", [False, True])
def test_forward_and_gradients(shape, training):
    torch.manual_seed(0)
    channels = shape[1]
    normalize = Normalize(channels).to(DEVICE)
    conv = nn.Conv2d(channels, 32, 3, padding=1, bias=False)
    conv = conv.to(DEVICE, HALF, memory_format=torch.channels_last)
    bn = nn.BatchNorm2d(32).to(DEVICE).train(training)
    bn.running_mean.uniform_(-0.5, 0.5)
    assert stem.supports(conv)
    x = torch.rand(shape, device=DEVICE, requires_grad=True)
    weight = conv.weight.detach().float().requires_grad_()
    statistics = bn.running_mean.clone(), bn.running_var.clone()
    total = F.conv2d(normalize(x), weight, None, 1, 1)
    active = F.relu(F.batch_norm(total, *statistics, bn.weight, bn.bias, training=training, momentum=0.1))
    forward = stem.forward_train if training else stem.forward_eval
    found = forward(x.detach(), normalize, conv, bn)
    close(found[0], total)
    close(found[1], active)
    close(bn.running_mean, statistics[0])
    close(bn.running_var, statistics[1])
    gradient = torch.randn_like(total).to(HALF, memory_format=torch.channels_last)
    by_image, by_weight = torch.autograd.grad(total, [x, weight], gradient.float())
    close(stem.input_grad(gradient, x.detach(), normalize, conv), by_image)
    if training:
        close(stem.weight_grad(gradient, found[3], conv), by_weight)
