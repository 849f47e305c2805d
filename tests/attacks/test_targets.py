"""Attacks towards target classes."""

import numpy as np
import pytest
import torch
from helpers.references import pgd as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from atas import attacks, threat
from atas.attacks import APGD, FAB, FGSM, PGD, AttackEnsemble, Square
from atas.attacks.losses import goal_loss, resists
from atas.core.rng import CounterRNG
from atas.errors import DataError, UsageError
from atas.threat import Linf

ATTACKS = {
    "fgsm": FGSM(),
    "pgd": PGD(steps=4, restarts=2),
    "apgd-ce": APGD(iterations=8),
    "apgd-dlr": APGD(loss="dlr", iterations=8),
    "apgd-t": APGD(loss="t", iterations=8),
    "fab": FAB(iterations=8),
    "square": Square(queries=30),
    "ensemble": AttackEnsemble(
        "all", (APGD(iterations=4), APGD(loss="t", iterations=4), FAB(iterations=4), Square(queries=9))
    ),
}


@pytest.fixture(params=list(ATTACKS))
def attack(request):
    return ATTACKS[request.param]


class _AwayFrom:
    """A network whose gradient ascends minus the cross-entropy."""

    def __init__(self, net):
        self._net = net

    def gradient(self, x, y):
        return -self._net.gradient(x, y)


@pytest.mark.parametrize("restarts", [1, 3])
def test_pgd_is_the_slow_reference_s(ball, make_images, labels, restarts):
    net = reference.Perceptron(2 * 4 * 3, gain=2)
    x, y = make_images(6, (2, 4, 3), dtype=torch.float64), labels(6, classes=3)
    targets, index = (y + 1) % 3, torch.arange(6)
    found = attacks.pgd(net.module, x, y, ball, 5, restarts=restarts, seed=5, targets=targets)
    for i in range(6):
        row = slice(i, i + 1)
        for restart in range(restarts):
            start = ball.random_start(x, CounterRNG(5, torch.tensor(restart), index))[row]
            expected = reference.pgd(_AwayFrom(net), x[row], targets[row], ball.name, ball.eps, start, 5, ball.eps / 5)[
                0
            ]
            if net.logits(expected).argmax() == targets[i]:
                break
        np.testing.assert_allclose(found[i].numpy(), expected, rtol=0, atol=1e-12)


def test_with_two_classes_the_other_class_is_the_target(attack, make_images, ball):
    """Away from one class is towards the other."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(24, 9), nn.Tanh(), nn.Linear(9, 2)).double()
    x = make_images(8, (2, 4, 3), dtype=torch.float64)
    y = model(x).argmax(1)
    expected = attack(model, x, y, ball)
    torch.testing.assert_close(attack(model, x, y, ball, targets=1 - y), expected, rtol=0, atol=1e-9)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.sampled_from(["linf", "l2"]), st.floats(1e-3, 1), st.integers(0, 2**40))
def test_points_lie_in_the_ball_and_searches_return_successes_or_the_image(small_net, make_images, norm, eps, seed):
    ball, net = threat.create(norm, eps), small_net(channels=1, sharpness=5.0).eval()
    x, y = make_images(3, (1, 4, 5), seed=seed % 1000), torch.tensor([0, 3, 1])
    targets = (y + 1 + seed % 3) % 4
    for kind, attack in ATTACKS.items():
        points = attack(net, x, y, ball, seed=seed, targets=targets)
        assert points.min() >= 0
        assert points.max() <= 1
        assert ball.distance(points, x).max() <= eps * (1 + 1e-5) + 1e-6
        with torch.no_grad():
            pushed = net(points).argmax(1) == targets
        if kind not in ("fgsm", "pgd"):
            assert torch.equal(points[~pushed], x[~pushed])


def test_one_class_for_all_images_and_success_is_the_target(attack, small_net, make_images):
    model, x = small_net(sharpness=5.0).eval(), make_images(12)
    with torch.no_grad():
        model.fc.bias -= model(x).mean(0)
        y = model(x).argmax(1)
    points = attack(model, x, y, Linf(0.3), targets=2)
    assert torch.equal(points, attack(model, x, y, Linf(0.3), targets=torch.full_like(y, 2)))
    with torch.no_grad():
        assert (model(points).argmax(1) == 2).sum() > max(5, (y == 2).sum())


def test_the_loss_of_a_target_is_positive_where_it_is_predicted():
    logits = torch.randn(500, 5, dtype=torch.float64)
    y = torch.randint(5, (500,))
    for kind in ("dlr", "t"):
        loss = goal_loss(kind, logits, y, y, targeted=True)
        assert torch.equal(loss > 0, ~resists(logits, y, targeted=True))


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (4, "targets must be classes that the model has, 0 to 3; got 4 to 4"),
        (torch.tensor([0, -1, 2]), "targets must be classes that the model has, 0 to 3; got -1 to 2"),
        (torch.tensor([0, 1]), r"one class per image as integers of shape \(3,\); got a tensor of shape \(2,\)"),
        (torch.tensor([0.0, 1, 2]), "one class per image as integers"),
        (torch.zeros(3, dtype=torch.int64, device="meta"), "the targets are on meta, the labels on cpu"),
    ],
)
def test_wrong_targets_are_refused(attack, small_net, make_images, ball, targets, message):
    with pytest.raises(DataError, match=message):
        attack(small_net(), make_images(3), torch.tensor([1, 2, 3]), ball, targets=targets)


def test_a_target_that_is_no_number_is_refused(attack, small_net, make_images, ball):
    with pytest.raises(UsageError, match="targets must be one class, or a tensor with one class per image; got"):
        attack(small_net(), make_images(3), torch.tensor([1, 2, 3]), ball, targets=[1, 2, 0])
    with pytest.raises(UsageError, match="targets must be a whole number; got 'cat'"):
        attack(small_net(), make_images(3), torch.tensor([1, 2, 3]), ball, targets="cat")
