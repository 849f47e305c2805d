"""PGD in slots: the same points as `pgd`, whatever the slots, and only the last one counts."""

from dataclasses import replace

import pytest
import torch
from helpers.references import pgd as reference

from atas.attacks import PGD
from atas.attacks.projected_gradient_descent import PGDRestart
from atas.attacks.scheduler import Scheduler, SearchProgress
from atas.threat import Linf


@pytest.fixture
def problem(make_images):
    model = reference.Perceptron(2 * 4 * 3, hidden=11, classes=4, gain=2).module
    x = make_images(20, (2, 4, 3), dtype=torch.float64)
    y = model(x).argmax(1)
    y[3] = (y[3] + 1) % 4
    return model, x, y


def scheduled(attack, model, x, y, ball, *, slots=7, poll_interval=3):
    """Which examples stay correct, and the points, if the attack's stages run one after the other on all examples."""
    scheduler = Scheduler(model, model, x.device, slots, poll_interval)
    examples = scheduler.examples(x, y, 50 + torch.arange(len(x)))
    broken, points = scheduler.run_stages(attack.stages, examples, ball, torch.zeros(len(x), dtype=torch.bool), seed=4)
    return ~broken, points


@pytest.mark.parametrize("restarts", [1, 3])
@pytest.mark.parametrize("step_size", [None, 0.02])
def test_verdicts_and_points_are_those_of_pgd(problem, ball, restarts, step_size):
    model, x, y = problem
    attack = PGD(steps=6, restarts=restarts, step_size=step_size)
    expected = attack(model, x, y, ball, seed=4, index=50 + torch.arange(20))
    holds, points = scheduled(attack, model, x, y, ball)
    assert torch.equal(holds, model(expected).argmax(1) == y)
    torch.testing.assert_close(points[~holds], expected[~holds], rtol=0, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("slots", "poll_interval"), [(1, 1), (3, 7), (64, 100)])
def test_verdicts_depend_neither_on_slots_nor_on_polls(problem, ball, slots, poll_interval):
    expected = scheduled(PGD(steps=5, restarts=2), *problem, ball)
    found = scheduled(PGD(steps=5, restarts=2), *problem, ball, slots=slots, poll_interval=poll_interval)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-9)


def test_a_longer_search_extends_a_shorter_one(problem, ball):
    model, x, y = problem
    scheduler = Scheduler(model, model, x.device, slots=7, poll_interval=3)
    examples = scheduler.examples(x, y, torch.arange(20))
    holds = torch.zeros(20, dtype=torch.bool)
    short, long = PGDRestart(4), PGDRestart(9)
    assert long.extends(short)
    assert not short.extends(long)
    assert not long.extends(PGDRestart(4, restart=1))
    assert not long.extends(PGDRestart(4, step_size=0.01))
    first = SearchProgress.start(short, examples, holds, record_warm_start=True)
    scheduler.run(short, examples, ball, first, seed=4)
    passes = []

    def counted(point):
        passes.append(len(point))
        return model(point)

    at_once, after = (SearchProgress.start(long, examples, holds, points=x.clone()) for _ in range(2))
    scheduler.run(long, examples, ball, at_once, seed=4)
    counting = replace(scheduler, search_model=counted, poll_interval=2)
    counting.run(long, examples, ball, after, seed=4, warm_start=first.warm_start)
    assert torch.equal(after.broken, at_once.broken)
    assert after.broken.any()
    assert torch.equal(after.points, at_once.points)
    assert torch.equal(after.queries_per_example, at_once.queries_per_example)
    assert sum(passes) == 5 * 7 * 3  # steps x slots x rounds


def test_a_point_on_the_way_does_not_count():
    """A band that PGD goes through: the model is wrong there, and right where the steps end."""

    def model(point):
        height = point.flatten(1).mean(1)
        inside = (height > 0.52) & (height < 0.56)
        margin = torch.where(inside, 0.0, 1.0) - 0.5 * height
        return torch.stack([margin, torch.zeros_like(margin)], 1)

    wrong = []

    def watched(point):
        wrong.append(bool(model(point).argmax(1) == 1))
        return model(point)

    x, y = torch.full((1, 1, 2, 2), 0.5), torch.tensor([0])
    scheduler = Scheduler(watched, model, x.device, slots=1, poll_interval=1)
    examples = scheduler.examples(x, y, torch.zeros(1, dtype=torch.int64))
    broken, _ = scheduler.run_stages(PGD(steps=10).stages, examples, Linf(0.1), torch.zeros(1, dtype=torch.bool))
    assert any(wrong), "the case must be one that is wrong on the way"
    assert not broken.any()


def test_a_gradient_that_is_not_a_number_leaves_the_point(ball):
    def model(point):
        total = point.flatten(1).mul(0).sum(1)
        return torch.stack([total.sqrt(), total + 1], 1)

    x, y = torch.rand(3, 1, 2, 2), torch.tensor([1, 1, 1])
    holds, points = scheduled(PGD(steps=3), model, x, y, ball)
    assert holds.all()
    assert points.isfinite().all()


def test_the_pgd_of_an_evaluation_names_its_stages():
    assert [stage.restart for stage in PGD(steps=50, restarts=3).stages] == [0, 1, 2]
    assert {stage.name for stage in PGD(steps=50, restarts=3).stages} == {"pgd50"}
    assert PGDRestart(7, 2).settings(Linf(0.1)) == PGD(steps=7).settings(Linf(0.1)) | {"restart": 2}
