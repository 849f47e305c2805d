"""Losses under PGD-10 and single steps, and the loss surface, against the attacks of the library."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from atas import Linf, attacks
from atas.core.rng import CounterRNG
from atas.paper import losses

THREAT = Linf(0.1)


@pytest.fixture
def subject(robust_digits):
    """A model, uint8 images and labels."""
    model, x, y = robust_digits
    return model, (255 * x[:50]).round().to(torch.uint8), y[:50]


def loss_at(model, points, y):
    with torch.no_grad():
        return F.cross_entropy(model(points), y, reduction="none")


def test_pgd10_is_that_of_the_library_whatever_the_batches(subject):
    model, images, y = subject
    x = images.float() / 255
    expected = attacks.pgd(model, x, y, THREAT, steps=10)
    with losses.prepare_runner(model, images, batch_size=16) as runner:  # 50 is no multiple of it
        assert runner.slots == 16
        loss, right = losses.attack_losses(runner, images, y, [losses.pgd10(THREAT)])
    assert torch.allclose(loss[0], loss_at(model, expected, y), atol=1e-5)
    assert torch.equal(right[0], model(expected).argmax(1) == y)


def test_a_single_step_from_noise_is_fgsm_rs(subject):
    model, images, y = subject
    x = images.float() / 255
    start = THREAT.random_start(x, CounterRNG(0, torch.tensor(0), torch.arange(50))).requires_grad_(True)
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(start), y, reduction="sum"), start)
    expected = (start.detach() + 0.07 * gradient.sign()).clamp(x - 0.1, x + 0.1).clamp(0, 1)
    step = losses.single_steps(THREAT, [0.07], lambda x, index: losses.random_start(THREAT, x, index))
    with losses.prepare_runner(model, images) as runner:
        loss, _ = losses.attack_losses(runner, images, y, [step])
    assert torch.allclose(loss[0], loss_at(model, expected, y), atol=1e-5)


def test_steps_of_several_sizes_share_one_gradient(subject):
    model, images, y = subject
    sizes, passes = (0.02, 0.05, 0.1), []
    model.register_forward_hook(lambda *_: passes.append(1))
    with losses.prepare_runner(model, images) as runner:
        apart = [losses.single_steps(THREAT, [size], lambda x, _: x) for size in sizes]
        expected, _ = losses.attack_losses(runner, images, y, apart)
        before = len(passes)
        assert before >= 2 * len(sizes)
        found, _ = losses.attack_losses(runner, images, y, [losses.single_steps(THREAT, sizes, lambda x, _: x)])
    assert len(passes) == before + 1 + len(sizes)  # a gradient, and the loss at each point
    assert torch.equal(found, expected)


def test_the_gap_is_zero_for_pgd10_itself_and_not_for_a_weaker_attack(subject):
    model, images, y = subject
    with losses.prepare_runner(model, images) as runner:
        still = losses.single_steps(THREAT, [1e-9], lambda x, _: x)
        loss, _ = losses.attack_losses(runner, images, y, [losses.pgd10(THREAT), losses.pgd10(THREAT), still])
    same, weak = losses.loss_gaps(loss[1:], loss[0])
    assert same == 0
    assert weak == pytest.approx(float((loss[0] - loss[2]).mean()), rel=1e-5)
    assert weak > 0.1


def test_the_model_is_left_as_it_was(subject):
    model, images, _ = subject
    model.train()
    with losses.prepare_runner(model, images):
        assert not model.training
    assert model.training
    model.eval()


# The surface


def test_the_surface_at_its_corners(subject):
    model, images, y = subject
    x = images.float() / 255
    found = losses.loss_surface(model, images, y, THREAT, points=5, batch_size=16)
    assert found.shape == (5, 5)
    assert found[0, 0].item() == pytest.approx(loss_at(model, x, y).mean().item(), abs=1e-5)
    fgsm = attacks.fgsm(model, x, y, THREAT)
    assert found[-1, 0].item() == pytest.approx(loss_at(model, fgsm, y).mean().item(), abs=1e-5)


def test_half_way_along_the_adversarial_direction(subject):
    model, images, y = subject
    x = images.float() / 255
    direction = attacks.fgsm(model, x, y, Linf(1e-3)) - x
    point = (x + 0.05 * direction.sign()).clamp(0, 1)
    inside = (direction != 0) | ((x > 0) & (x < 1))
    assert inside.float().mean() > 0.3  # where the step was not clamped away, its sign is the gradient's
    found = losses.loss_surface(model, images, y, THREAT, points=3)
    assert found[1, 0].item() == pytest.approx(loss_at(model, point, y).mean().item(), abs=1e-5)


def test_the_random_direction_is_random_and_the_same_every_time(subject):
    model, images, y = subject
    once, again = (losses.loss_surface(model, images, y, THREAT, points=3) for _ in range(2))
    assert torch.equal(once, again)
    assert once[0, -1] < once[-1, 0]  # noise does less than the gradient's direction


def test_where_the_largest_loss_is():
    linear = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    images = torch.full((8, 1, 4, 4), 128, dtype=torch.uint8)
    assert losses.peak_position(losses.loss_surface(linear, images, torch.arange(8) % 3, THREAT, points=4)) == 1
    bent = torch.zeros(5, 5)
    bent[2, 0] = 1
    bent[4, 3] = 9  # not along the adversarial direction
    assert losses.peak_position(bent) == 0.5
