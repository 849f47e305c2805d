"""Whole networks through the kernels, against their plain forward pass."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import atas


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["preact-resnet18", "wrn-28-10"])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("side", "window"), [(32, None), (40, None), (40, 4)])
def test_gradients_are_those_of_the_plain_network(name, training, side, window):
    from atas.kernels import fused_forward, weights

    torch.manual_seed(0)
    allowed, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    try:
        plain = atas.models.create(name, 10).cuda().to(memory_format=torch.channels_last)
        plain.window = window
        by_hand = copy.deepcopy(plain)
        x, y = torch.rand(32, 3, side, side, device="cuda"), torch.randint(10, (32,), device="cuda")
        forward = fused_forward(by_hand)
        found = []
        for model, call in ((plain, plain), (by_hand, forward)):
            model.train(training).requires_grad_(training)
            image = x.clone().requires_grad_()
            loss = F.cross_entropy(call(image), y)
            wanted = [image, *(weight for weight in model.parameters() if weight.requires_grad)]
            found.append((loss.detach(), torch.autograd.grad(loss, wanted)))
            weights.join()
    finally:
        torch.backends.cudnn.allow_tf32 = allowed
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-4, rtol=1e-4)
    for expected, gradient in zip(found[0][1], found[1][1], strict=True):
        # A pixel whose ReLU sits at zero may fall to either side; beyond that the gradients agree.
        assert (expected - gradient).norm() <= 0.02 * expected.norm()
    statistics = zip(plain.named_buffers(), by_hand.buffers(), strict=True)
    for (key, expected), buffer in statistics:
        if not key.endswith("num_batches_tracked"):
            torch.testing.assert_close(buffer, expected, atol=1e-5, rtol=1e-4)


class Sub(atas.models.PreActResNet):
    """Another forward pass, perhaps."""


def exchanged():
    model = atas.models.create("preact-resnet18", 10)
    model.fc = torch.nn.Sequential(torch.nn.Dropout(), model.fc)
    return model


def hooked():
    model = atas.models.create("wrn-28-10", 10)
    model.layer1.register_forward_hook(lambda *_: None)
    return model


def test_only_our_networks_as_we_made_them_have_kernels():
    pytest.importorskip("triton", reason="the kernels need Triton, which comes with PyTorch for CUDA")
    from atas.kernels import has_kernels

    assert has_kernels(atas.models.create("preact-resnet18", 10))
    assert has_kernels(atas.models.create("wrn-28-10", 100))
    assert not has_kernels(atas.models.create("resnet18", 10))
    assert not has_kernels(Sub(10, atas.models.Normalize(3)))
    assert not has_kernels(exchanged())
    assert not has_kernels(hooked())
