"""Lanes and the queue: what becomes of an example depends on nothing but the example, the model and the seed."""

import copy
import dataclasses

import pytest
import torch

from atas import threat
from atas.attacks._apgd import APGD
from atas.attacks._fab import FAB
from atas.attacks._lanes import Lanes
from atas.attacks._queue import Examples, Ledger, one_by_one, run
from atas.attacks._square import Square
from atas.errors import DataError
from atas.threat import Linf

from . import reference
from .driving import course, filled, recorded

SEARCHES = {
    search.name: search
    for search in (APGD("ce", 10), APGD("dlr", 10), APGD("t", 10), FAB(iterations=6), Square(queries=25))
}
CLASSES = 4
SHAPE = (2, 4, 3)


@pytest.fixture(params=list(SEARCHES))
def search(request):
    return SEARCHES[request.param]


@pytest.fixture(params=[("linf", 0.04), ("l2", 0.15)], ids=["linf", "l2"])
def small_ball(request):
    return threat.create(*request.param)


@pytest.fixture
def model():
    return reference.Perceptron(2 * 4 * 3, hidden=11, classes=CLASSES, gain=2).module


@pytest.fixture
def data(model, make_images):
    """Twenty images, three of them misclassified."""
    x = make_images(20, SHAPE, dtype=torch.float64)
    y = model(x).argmax(1)
    y[[4, 5, 11]] = (y[[4, 5, 11]] + 1) % CLASSES
    return x, y, 100 + torch.arange(20)


def examples_of(model, data):
    return Examples.of(model, *data, batch=8, device=torch.device("cpu"))


def attacked(search, model, data, ball, *, judge=None, ledger=None, logits=None, **options):
    examples = examples_of(judge or model, data)
    ledger = ledger or Ledger.open(search, examples, examples.misclassified())
    run(search, logits or model, judge or model, examples, ball, ledger, **{"lanes": 8, "every": 3} | options)
    return ledger


def test_a_lane_s_course_depends_on_nothing_else(search, model, data, small_ball):
    """The same job alone, and in another lane, beside others that began earlier or were replaced."""
    x, y, _ = data
    job = {"x": x[3:4], "y": y[3:4], "target": (y[3:4] + 2) % CLASSES, "example": torch.tensor([3]), "rank": 1}
    alone = Lanes.empty(1, x)
    alone.fill(torch.tensor([0]), **job)
    expected, _ = course(search, alone, model, small_ball, classes=CLASSES)

    lanes, seen = filled(x[10:16], y[10:16], (y[10:16] + 1) % CLASSES), []
    state = search.begin(lanes, small_ball, CLASSES, 0)
    for step in range(5 + search.steps):
        if step == 5:
            lanes.fill(torch.tensor([2]), **job)
        if step == 8:
            lanes.fill(torch.tensor([1]), x=x[:1], y=y[:1], target=y[:1], example=torch.tensor([0]))
            lanes.active[4] = False
        state.step(recorded(model, seen))
        lanes.broken.fill_(False)
    found = torch.stack(seen)[5 * search.evaluations :, 2]
    torch.testing.assert_close(found, expected[:, 0], rtol=0, atol=1e-9)
    torch.testing.assert_close(lanes.point[2], alone.point[0], rtol=0, atol=1e-9)
    assert lanes.clock[2] == alone.clock[0]


def test_steps_of_idle_lanes_change_nothing(search, model, data, small_ball):
    lanes = Lanes.empty(3, data[0])
    before = copy.deepcopy(lanes)
    state = search.begin(lanes, small_ball, CLASSES, 0)
    state.step(model)
    state.step(model)
    for field in dataclasses.fields(Lanes):
        assert torch.equal(getattr(lanes, field.name), getattr(before, field.name)), field.name


@pytest.mark.parametrize("shape", [(2, 4, 3), (3, 5, 7), (1, 8, 8)])
def test_lanes_keep_their_layout_and_the_type_of_the_images(shape, search, small_ball):
    x = torch.rand(4, *shape)
    model = reference.Perceptron(x[0].numel(), classes=CLASSES).module.float()
    lanes = filled(x, torch.arange(4), 3 - torch.arange(4))
    state = search.begin(lanes, small_ball, CLASSES, 0)
    state.step(model)
    state.step(model)
    for tensor in (lanes.x, lanes.point):
        assert tensor.is_contiguous()
        assert tensor.dtype == torch.float32


def test_verdicts_depend_neither_on_the_lanes_nor_on_the_looks(search, model, data, small_ball):
    found = [
        attacked(search, model, data, small_ball, lanes=lanes, every=every)
        for lanes, every in ((7, 3), (2, 1), (500, 50))
    ]
    for ledger in found:
        assert torch.equal(ledger.broken, found[0].broken)
        assert torch.equal(model(ledger.point).argmax(1) != data[1], ledger.broken)
        assert small_ball.distance(ledger.point, data[0]).max() <= small_ball.eps + 1e-9
        assert ledger.finished[~ledger.broken].all()
    assert 3 < found[0].broken.sum() < 20


def test_verdicts_are_those_of_each_job_by_itself(search, model, data, small_ball):
    x, y, index = data
    ledger = attacked(search, model, data, small_ball)
    examples = examples_of(model, data)
    expected = examples.misclassified()
    for rank, target in enumerate(examples.targets(search).T):
        lanes = filled(x, y, target, rank)
        lanes.example.copy_(index)
        expected |= course(search, lanes, model, small_ball, classes=CLASSES)[1]
    assert torch.equal(ledger.broken, expected)


def test_an_example_takes_its_random_numbers_along(model, data, small_ball):
    order = torch.randperm(20)
    search = SEARCHES["square"]
    ledger = attacked(search, model, data, small_ball)
    shuffled = attacked(search, model, [part[order] for part in data], small_ball)
    torch.testing.assert_close(shuffled.point, ledger.point[order], rtol=0, atol=1e-9)
    assert torch.equal(shuffled.evaluations, ledger.evaluations[order])
    other_numbers = attacked(search, model, (*data[:2], data[2] + 1), small_ball)
    assert not torch.equal(other_numbers.point, ledger.point)
    assert not torch.equal(attacked(search, model, data, small_ball, seed=1).point, ledger.point)


@pytest.mark.parametrize("stop", [1, 4])
def test_after_a_stop_the_rest_is_done_with_the_same_verdicts(search, model, data, small_ball, stop):
    expected = attacked(search, model, data, small_ball)
    looks = []

    def interrupt(left):
        looks.append(left)
        if len(looks) == stop:
            raise KeyboardInterrupt

    examples = examples_of(model, data)
    ledger = Ledger.open(search, examples, examples.misclassified())
    with pytest.raises(KeyboardInterrupt):
        attacked(search, model, data, small_ball, ledger=ledger, on_look=interrupt, every=4)
    saved = copy.deepcopy(ledger)
    resumed = attacked(search, model, data, small_ball, ledger=ledger)
    assert torch.equal(resumed.broken, expected.broken)
    assert (resumed.broken >= saved.broken).all()
    over = saved.broken | saved.finished.all(1)
    assert torch.equal(resumed.evaluations[over], saved.evaluations[over]), "what was over is not done again"
    assert torch.equal(resumed.point[saved.broken], saved.point[saved.broken])


def bonus(model, y_of, size):
    """A judge that is so much more in favour of the label; it knows the label by the image."""

    def judge(point):
        logits = model(point)
        return logits + size * torch.nn.functional.one_hot(y_of(point), CLASSES)

    return judge


@pytest.mark.parametrize("size", [0.05, 100.0])
def test_only_what_the_judge_confirms_counts_and_else_the_search_goes_on(search, model, data, small_ball, size):
    x, y, index = data

    def label_of(point):
        return y[(point.unsqueeze(1) - x).flatten(2).norm(dim=2).argmin(1)]

    judge = bonus(model, label_of, size)
    ledger = attacked(search, model, data, small_ball, judge=judge)
    examples = examples_of(judge, data)
    expected = examples.misclassified()
    flagged = torch.zeros(20, dtype=torch.bool)
    for rank, target in enumerate(examples.targets(search).T):
        lanes = filled(x, y, target, rank)
        lanes.example.copy_(index)
        state = search.begin(lanes, small_ball, CLASSES, 0)
        for _ in range(search.steps):
            state.step(model)
            confirmed = judge(lanes.point).argmax(1) != y
            expected |= confirmed & lanes.broken
            flagged |= lanes.broken
            lanes.broken.fill_(False)
        expected |= judge(small_ball.project(lanes.point, x)).argmax(1) != y
    assert torch.equal(ledger.broken, expected)
    assert torch.equal(judge(ledger.point).argmax(1) != y, ledger.broken)
    assert (flagged & ~ledger.broken).any(), "the case must hold points that are not confirmed"
    if size == 100:
        assert not ledger.broken.any()
        assert ledger.finished.all()


def test_a_point_outside_of_the_ball_does_not_count():
    class Leaper:
        """Claims that a far point is adversarial, and leaves it at that."""

        name, steps, evaluations, gradients = "leap", 1, 1, 0

        def targets(self, classes):
            return 0

        def begin(self, lanes, ball, classes, seed):
            self.lanes = lanes
            return self

        def step(self, logits):
            moving = self.lanes.moving()
            self.lanes.point[moving] = 2.0
            for flags in (self.lanes.broken, self.lanes.done, self.lanes.clock):
                flags.add_(moving)

    def model(point):
        darkest = point.flatten(1).amin(1)
        return torch.stack([0.7 - darkest, darkest - 0.7], 1)

    x, y = torch.full((2, 1, 2, 2), 0.5), torch.tensor([0, 0])
    x[1] = 0.65
    ledger = attacked(Leaper(), model, (x, y, torch.arange(2)), Linf(0.1))
    assert ledger.broken.tolist() == [False, True]
    torch.testing.assert_close(ledger.point[1], torch.full((1, 2, 2), 0.75))
    assert torch.equal(ledger.point[0], x[0])


def test_targets_come_in_the_order_of_the_logits_and_likely_ones_first(model, data):
    examples = examples_of(model, data)
    targets = examples.targets(APGD("t"))
    assert targets.shape == (20, CLASSES - 1)
    for row, label, logits in zip(targets.tolist(), data[1].tolist(), model(data[0]), strict=True):
        assert row == [c for c in logits.argsort(descending=True).tolist() if c != label]
    assert torch.equal(examples.targets(APGD("ce")), data[1].unsqueeze(1))
    ledger = Ledger.open(APGD("t"), examples, examples.misclassified())
    ledger.finished[0, 0] = True
    left = [i for i in range(20) if i not in (4, 5, 11)]
    assert ledger.jobs().tolist() == [[0, i] for i in left[1:]] + [[rank, i] for rank in (1, 2) for i in left]


def test_evaluations_are_counted(search, model, data, small_ball):
    ledger = attacked(search, model, data, small_ball)
    most = search.steps * search.evaluations * ledger.finished.shape[1]
    broken_here = ledger.broken & ~examples_of(model, data).misclassified()
    assert (ledger.evaluations[[4, 5, 11]] == 0).all()
    assert (ledger.evaluations[broken_here] > 0).all()
    assert (ledger.evaluations[broken_here] <= most).all()
    if not isinstance(search, FAB):  # whose jobs may be over sooner
        assert (ledger.evaluations[~ledger.broken] == most).all()
    assert ledger.evaluations[broken_here].float().mean() < 0.9 * most


def test_an_iteration_asks_as_often_as_it_says_and_for_as_many_gradients(search, model, data, small_ball):
    asked, led_back = [], []

    def watched(x):
        output = model(x)
        asked.append(1)
        if output.requires_grad:
            output.register_hook(lambda _: led_back.append(1))
        return output

    steps = []

    def counted(step):
        return lambda count: [(step(), steps.append(1)) for _ in range(count)]

    attacked(search, model, data, small_ball, judge=model, logits=watched, repeat=counted)
    assert len(asked) == len(steps) * search.evaluations
    assert len(led_back) == len(steps) * search.gradients


def test_a_look_says_how_much_is_left(search, model, data, small_ball):
    left = []
    ledger = attacked(search, model, data, small_ball, on_look=left.append)
    assert left == sorted(left, reverse=True)
    assert left[-1] == 0
    assert left[0] <= 17 * ledger.finished.shape[1] * search.steps * search.evaluations
    assert len(left) > 3


def test_lanes_are_full_while_there_are_jobs(model, data, small_ball):
    search, seen = APGD("ce", 10), []
    ledger = attacked(search, model, data, small_ball, logits=recorded(model, seen), lanes=3, every=1)
    assert {len(point) for point in seen} == {3}
    assert ledger.evaluations.sum() >= 3 * (len(seen) - search.steps), "idle only while the last jobs are under way"


def test_another_way_to_repeat_may_warm_up(search, model, data, small_ball):
    counts = []

    def warm(step):
        step()
        step()
        plain = one_by_one(step)

        def times(count):
            counts.append(count)
            plain(count)

        return times

    found = attacked(search, model, data, small_ball, repeat=warm, every=4)
    expected = attacked(search, model, data, small_ball, every=4)
    assert set(counts) <= {1, 2, 3, 4}
    for name in ("broken", "finished", "evaluations", "point"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_without_a_job_nothing_happens(search, model, data, small_ball):
    def never(*_):
        raise AssertionError

    examples = examples_of(model, data)
    ledger = Ledger.open(search, examples, torch.ones(20, dtype=torch.bool))
    run(search, never, never, examples, small_ball, ledger, on_look=never)
    assert torch.equal(ledger.point, data[0])


def test_labels_that_the_model_does_not_have_are_refused(model, data):
    with pytest.raises(DataError, match="outside of"):
        examples_of(model, (data[0], data[1] + 3, data[2]))
