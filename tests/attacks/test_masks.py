"""Attacks on some of the pixels."""

import numpy as np
import pytest
import torch
from helpers.references import pgd as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from atas import attacks, threat
from atas.attacks import APGD, FAB, FGSM, PGD, AttackEnsemble, Square
from atas.attacks.square import restrict_proposal
from atas.core.rng import CounterRNG
from atas.errors import DataError, UsageError
from atas.threat import L2, Linf

ATTACKS = {
    "fgsm": FGSM(),
    "pgd": PGD(steps=4, restarts=2),
    "apgd-ce": APGD(iterations=8),
    "apgd-t": APGD(loss="t", iterations=5),
    "fab": FAB(iterations=8),
    "square": Square(queries=30),
}
ATTACKS["ensemble"] = AttackEnsemble("all", (APGD(iterations=4), FAB(iterations=4), Square(queries=9)))


@pytest.fixture(params=list(ATTACKS))
def attack(request):
    return ATTACKS[request.param]


@pytest.fixture
def problem(small_net, make_images):
    model, x = small_net(sharpness=5.0).double().eval(), make_images(5, dtype=torch.float64)
    with torch.no_grad():
        model.fc.bias -= model(x).mean(0)
        return model, x, model(x).argmax(1)


def random_mask(shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.4


def test_pgd_is_the_slow_reference_s(ball, make_images, labels):
    """The mask of the reference is a loop over pixels."""
    net = reference.Perceptron(2 * 4 * 3, gain=2)
    x, y = make_images(5, (2, 4, 3), dtype=torch.float64), labels(5, classes=3)
    masks = random_mask((5, 2, 4, 3))
    masked = ball.masked(masks)
    starts = masked.random_start(x, CounterRNG(5, torch.tensor(0), torch.arange(5)))
    found = attacks.pgd(net.module, x, y, masked, 6, 0.3 * ball.eps, seed=5)
    for i in range(5):
        image, point = x[i].numpy(), starts[i].numpy()
        for _ in range(6):
            gradient = net.gradient(point, y[i])
            for pixel in np.ndindex(*image.shape):
                if not masks[i][pixel]:
                    gradient[pixel] = 0
                    assert point[pixel] == image[pixel]
            point = reference.step(ball.name, point, image, gradient, 0.3 * ball.eps, ball.eps)
        np.testing.assert_allclose(found[i].numpy(), point, rtol=0, atol=1e-12)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(["linf", "l2"]),
    st.floats(1e-3, 1),
    st.integers(0, 2**40),
    st.sampled_from([(4, 5), (1, 4, 5), (2, 4, 5), (3, 1, 4, 5), (3, 2, 4, 5)]),
    st.booleans(),
)
def test_other_pixels_are_untouched_to_the_bit(small_net, make_images, norm, eps, seed, shape, targeted):
    mask = random_mask(shape, seed % 997)
    mask[..., 0, 0] = True
    ball, net = threat.create(norm, eps).masked(mask), small_net(channels=2, sharpness=5.0).eval()
    x, y = make_images(3, (2, 4, 5), seed=seed % 1000), torch.tensor([0, 3, 1])
    changes = mask.expand(3, 2, 4, 5)
    for attack in ATTACKS.values():
        points = attack(net, x, y, ball, seed=seed, targets=(y + 1) % 4 if targeted else None)
        assert torch.equal(points[~changes], x[~changes])
        assert points.min() >= 0
        assert points.max() <= 1
        assert ball.distance(points, x).max() <= eps * (1 + 1e-5) + 1e-6


def test_attacks_find_more_with_more_pixels_and_change_only_those(attack, problem):
    model, x, y = problem
    none = torch.zeros(x.shape[2:], dtype=torch.bool)
    none[0, 0] = True
    half = none.clone()
    half[:, : x.shape[3] // 2] = True
    broken = []
    for mask in (none, half, torch.ones_like(half)):
        points = attack(model, x, y, Linf(0.6).masked(mask))
        assert torch.equal(points[:, :, ~mask], x[:, :, ~mask])
        broken.append(int((model(points).argmax(1) != y).sum()))
    assert broken[0] <= broken[1]
    assert broken[0] < broken[2]


def test_a_mask_of_all_pixels_changes_nothing(attack, problem):
    model, x, y = problem
    expected = attack(model, x, y, Linf(0.1))
    torch.testing.assert_close(
        attack(model, x, y, Linf(0.1).masked(torch.ones(x.shape[2:]))), expected, rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("kind", [Linf, L2])
def test_each_image_has_its_own_mask(attack, problem, kind):
    """As if it were alone, also in slots that are used again."""
    model, x, y = problem
    masks = random_mask((len(x), 1, *x.shape[2:]), 3)
    together = attack(model, x, y, kind(0.3).masked(masks))
    for i in range(len(x)):
        row = slice(i, i + 1)
        alone = attack(model, x[row], y[row], kind(0.3).masked(masks[i]), index=torch.tensor([i]))
        torch.testing.assert_close(together[row], alone, rtol=0, atol=1e-9)


def test_l2_samples_fill_the_ball_of_the_free_pixels():
    """Of d dimensions, the d-th power of the radius is uniform."""
    mask = torch.zeros(1, 5, 5)
    mask[0, 0, :3] = 1
    ball, count = L2(0.5).masked(mask), 4000
    sample = ball.sample(CounterRNG(0, torch.tensor(0), torch.arange(count)), (1, 5, 5))
    assert not sample[:, mask == 0].any()
    volume = ((sample.flatten(1).norm(dim=1) / 0.5) ** 3).sort().values
    assert (volume - (torch.arange(count) + 0.5) / count).abs().max() < 0.03


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.zeros(4, 4), "the mask lets no pixel change"),
        (torch.full((4, 4), 0.5), "a mask holds 0 and 1"),
        (torch.ones(4), "a mask is a tensor .* got shape"),
        ([[1]], "a mask is a tensor .* got list"),
    ],
)
def test_wrong_masks_are_refused(mask, message):
    with pytest.raises(DataError, match=message):
        Linf(0.1).masked(mask)


def test_masks_that_do_not_fit_are_refused(attack, problem):
    model, x, y = problem
    size = x.shape[2:]
    for mask in (torch.ones(3, 3), torch.ones(2, *size), torch.ones(len(x) + 1, 1, *size)):
        with pytest.raises(DataError, match="does not fit images of shape"):
            attack(model, x, y, Linf(0.1).masked(mask))
    with pytest.raises(UsageError, match="has a mask already"):
        Linf(0.1).masked(torch.ones(4, 4)).masked(torch.ones(4, 4))


def test_a_mask_on_another_device_is_refused(attack, problem):
    model, x, y = problem
    with pytest.raises(DataError, match="the mask is on meta, the images on cpu"):
        attack(model, x, y, threat.Masked(Linf(0.1), torch.ones(1, *x.shape[2:], device="meta")))


def test_square_spends_the_whole_l2_budget_on_the_pixels_that_may_change():
    """Whatever share of a proposal's change lies on other pixels, unless the image ends at 0 or 1."""
    generator = torch.Generator().manual_seed(0)
    x = torch.full((6, 2, 5, 4), 0.5, dtype=torch.float64)
    proposal = x + 0.02 * torch.randn(x.shape, dtype=torch.float64, generator=generator)
    masks = random_mask((6, 1, 5, 4))
    found = restrict_proposal(L2(0.1).masked(masks), proposal, x)
    for i in range(6):
        change = (proposal[i] - x[i]) * masks[i]
        torch.testing.assert_close(found[i], x[i] + 0.1 * change / change.square().sum().sqrt(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("kind", [Linf, L2])
def test_fab_goes_to_the_boundary_along_the_pixels_that_may_change(kind):
    """Of a linear model one iteration reaches it, 5% beyond the smallest perturbation of these pixels."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(24, 2)).double()
    model[1].weight.data.normal_(generator=generator)
    x = 0.45 + 0.1 * torch.rand(20, 2, 4, 3, dtype=torch.float64, generator=generator)
    weight = (model[1].weight[0] - model[1].weight[1]).detach()
    model[1].bias.data[0] -= (model(x)[:, 0] - model(x)[:, 1]).mean().detach()
    masks = random_mask((20, 2, 4, 3), 1)
    free = masks.flatten(1) * weight
    margin = (model(x)[:, 0] - model(x)[:, 1]).detach().abs()
    exact = margin / (free.abs().sum(1) if kind is Linf else free.norm(dim=1))
    assert exact.max() < 0.4, "no pixel is clipped"
    y = model(x).argmax(1)
    for factor, broken in ((0.99, False), (1.06, True)):
        for i in range(len(x)):
            row = slice(i, i + 1)
            ball = kind(factor * float(exact[i])).masked(masks[i])
            point = FAB(iterations=1)(model, x[row], y[row], ball)
            assert bool(model(point).argmax(1) != y[row]) == broken
