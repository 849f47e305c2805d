"""Losses and margins at the ends of the range of logits."""

import pytest
import torch
from helpers.logits import assert_like_float64, extreme_logits, value_and_gradient
from hypothesis import given, settings

from atas.attacks.losses import LOSSES, attack_loss, margin, target_margin
from atas.core.autograd import cross_entropy, cross_entropy_sum


@pytest.mark.parametrize("loss", [cross_entropy, cross_entropy_sum])
@pytest.mark.slow
@settings(max_examples=60)
@given(extreme_logits())
def test_the_cross_entropy_is_that_of_float64(loss, batch):
    logits, y = batch
    assert_like_float64(lambda z: loss(z, y), logits)


@pytest.mark.slow
@settings(max_examples=60)
@given(extreme_logits())
def test_margins_are_those_of_float64(batch):
    logits, y = batch
    assert_like_float64(lambda z: margin(z, y), logits)
    assert_like_float64(lambda z: target_margin(z, y, (y + 1) % logits.shape[1]), logits)


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.slow
@settings(max_examples=60)
@given(extreme_logits())
def test_attack_losses_and_their_gradients_are_finite_and_right(kind, batch):
    """Also where the logits that a ratio divides by are equal; there its gradient is as long as it gets."""
    logits, y = batch
    target = (y + 1) % logits.shape[1]
    value, gradient = value_and_gradient(lambda z: attack_loss(kind, z, y, target), logits.float())
    right, slope = value_and_gradient(lambda z: attack_loss(kind, z, y, target), logits.double())
    assert value.isfinite().all()
    assert gradient.isfinite().all()
    torch.testing.assert_close(value.double(), right, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gradient.double(), slope, rtol=1e-3, atol=1e-4)
