"""The divergence that TRADES trains with."""

import pytest
import torch
import torch.nn.functional as F
from helpers.logits import assert_like_float64, extreme_logits
from hypothesis import given, settings
from torch import nn

import atas
from atas.methods.trades import divergence


def exact(logits, reference):
    """KL(reference || logits) from logarithms alone."""
    known, other = reference.log_softmax(1), logits.log_softmax(1)
    return (known.exp() * (known - other)).sum()


@pytest.mark.slow
@settings(max_examples=60)
@given(extreme_logits(classes=4), extreme_logits(classes=4))
def test_the_divergence_and_its_gradients_are_those_of_float64(first, second):
    (logits, _), (reference, _) = first, second
    logits = logits.to(reference.dtype)
    by_logits, by_reference = (
        [lambda z, kl=kl: kl(z, reference.to(z.dtype)) for kl in (divergence, exact)],
        [lambda z, kl=kl: kl(logits.to(z.dtype), z) for kl in (divergence, exact)],
    )
    assert_like_float64(by_logits[0], logits, by_logits[1], others=reference)
    assert_like_float64(by_reference[0], reference, by_reference[1], others=logits)


@pytest.mark.parametrize("margin", [90.0, 103.0, 104.0, 110.0, 1e4, 1e30])
def test_confident_predictions_have_a_finite_gradient(margin):
    logits = torch.tensor([[margin, 0.0, -1.0], [0.0, margin, 1.0]], requires_grad=True)
    reference = torch.tensor([[margin, 0.0, 1.0], [margin, 0.0, 1.0]], requires_grad=True)
    value = divergence(logits, reference)
    torch.testing.assert_close(value.double(), exact(logits.double(), reference.double()), rtol=1e-6, atol=0)
    for gradient in torch.autograd.grad(value, [logits, reference]):
        assert gradient.isfinite().all()


def test_ordinary_predictions_keep_their_bits():
    logits, reference = (torch.randn(16, 10, requires_grad=True) for _ in range(2))
    plain = F.kl_div(logits.log_softmax(1), reference.softmax(1), reduction="sum")
    value = divergence(logits, reference)
    assert torch.equal(value, plain)
    for found, right in zip(
        torch.autograd.grad(value, [logits, reference]), torch.autograd.grad(plain, [logits, reference]), strict=True
    ):
        assert torch.equal(found, right)


def test_a_step_on_a_confident_model_is_finite(make_images):
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
    with torch.no_grad():
        model[1].weight.mul_(3000)
    method = atas.methods.create("trades", atas.Linf(8 / 255), 8, (3, 8, 8), steps=2)
    method.start_epoch(0, 2)
    x, y = make_images(8, (3, 8, 8)), torch.arange(8) % 4
    assert model(x).softmax(1).eq(0).any()
    step = method.step(model, torch.optim.SGD(model.parameters(), lr=0.1), x, y, torch.arange(8))
    assert step.loss.isfinite()
    assert all(weight.isfinite().all() for weight in model.parameters())
