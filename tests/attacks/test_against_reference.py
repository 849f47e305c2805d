"""FGSM and PGD against a slow reference, against a closed form, and against foolbox where it is installed."""

import numpy as np
import pytest
import torch
from helpers.references import pgd as reference
from torch import nn

from atas import attacks
from atas.core.rng import CounterRNG
from atas.threat import Linf


@pytest.fixture
def problem(make_images, labels):
    return reference.Perceptron(2 * 4 * 3), make_images(6, (2, 4, 3), dtype=torch.float64), labels(6, classes=3)


def test_fgsm(problem, ball):
    net, x, y = problem
    found = attacks.fgsm(net.module, x, y, ball)
    np.testing.assert_allclose(found.numpy(), reference.fgsm(net, x, y, ball.name, ball.eps), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("steps", "step_size"), [(1, None), (10, None), (7, 0.02)])
def test_pgd(problem, ball, steps, step_size):
    net, x, y = problem
    starts = ball.random_start(x, CounterRNG(5, torch.tensor(0), torch.arange(len(x))))
    found = attacks.pgd(net.module, x, y, ball, steps, step_size, seed=5)
    expected = reference.pgd(net, x, y, ball.name, ball.eps, starts, steps, step_size or ball.eps / 5)
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-12)


def test_pgd_with_restarts_takes_the_first_start_that_fools_and_else_the_last(problem):
    net, x, y = problem
    ball, restarts = Linf(0.02), 5
    with torch.no_grad():  # most labels are the predictions, two are not, and one is on the edge
        logits = net.module(x)
        y = torch.where(torch.arange(len(x)) < 2, y, logits.argmax(1))
        net.module[3].bias.data[y[-1]] -= logits[-1].topk(2).values.diff().abs().item() - 1e-3
    index = torch.arange(len(x))
    outcomes = set()
    found = attacks.pgd(net.module, x, y, ball, 1, 1e-5, restarts=restarts, seed=5)
    for i in range(len(x)):
        points = [
            reference.pgd(
                net,
                x[i : i + 1],
                y[i : i + 1],
                ball.name,
                ball.eps,
                ball.random_start(x, CounterRNG(5, torch.tensor(r), index))[i : i + 1],
                1,
                1e-5,
            )[0]
            for r in range(restarts)
        ]
        fooling = [r for r in range(restarts) if net.logits(points[r]).argmax() != y[i]]
        outcomes.add(fooling[0] if fooling else "none")
        expected = points[fooling[0] if fooling else -1]
        np.testing.assert_allclose(found[i].numpy(), expected, rtol=0, atol=1e-12)
    assert {0, "none"} < outcomes, "the case must hold examples broken at once, later and never"


@pytest.mark.slow
def test_pgd_finds_exactly_the_robust_examples_of_a_linear_model(generator):
    """Of two classes, the worst point is known: every pixel goes against the difference of the two weights."""
    pixels, n, eps = 12, 400, 0.1
    model = nn.Sequential(nn.Flatten(), nn.Linear(pixels, 2))
    model[1].weight.data.normal_(generator=generator)
    model[1].bias.data.zero_()
    x = torch.rand(n, 3, 2, 2, generator=generator)
    difference = (model[1].weight[0] - model[1].weight[1]).detach()
    offset = difference.sum().item() / 2
    model[1].bias.data.copy_(torch.tensor([-offset / 2, offset / 2]))
    clean = x.flatten(1).double() @ difference.double() - offset
    y = (clean < 0).long()
    side = 1 - 2 * y.double()[:, None]  # +1 where the label is class 0
    worst = (x.flatten(1).double() - eps * side * difference.double().sign()).clamp(0, 1)
    margin = side[:, 0] * (worst @ difference.double() - offset)
    assert margin.abs().min() > 1e-4, "no example so close to the edge that rounding decides"
    assert 0.2 < (margin > 0).double().mean() < 0.8

    for found in (attacks.pgd(model, x, y, Linf(eps), steps=10), attacks.fgsm(model, x, y, Linf(eps))):
        assert torch.equal(model(found).argmax(1) == y, margin > 0)
        torch.testing.assert_close(found.flatten(1).double(), worst, rtol=0, atol=1e-6)


@pytest.mark.parametrize("steps", [1, 10])
def test_pgd_is_foolbox_s(problem, steps):
    foolbox = pytest.importorskip("foolbox", reason="foolbox is not installed")
    import eagerpy

    net, x, y = problem
    ball = Linf(8 / 255)
    starts = ball.random_start(x, CounterRNG(0, torch.tensor(0), torch.arange(len(x))))

    class FromOurStarts(foolbox.attacks.LinfProjectedGradientDescentAttack):
        def get_random_start(self, x0, epsilon):
            return eagerpy.astensor(starts)

    theirs = FromOurStarts(rel_stepsize=1 / 5, steps=steps, random_start=True).run(
        foolbox.PyTorchModel(net.module.eval(), bounds=(0, 1)), x, y, epsilon=ball.eps
    )
    torch.testing.assert_close(attacks.pgd(net.module, x, y, ball, steps), theirs, rtol=0, atol=1e-12)
