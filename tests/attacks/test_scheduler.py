"""Scheduler and slots: the result for an example depends only on the example, the model and the seed."""

import copy
import dataclasses

import pytest
import torch
from helpers.attack_states import course, filled, recorded
from helpers.references import pgd as reference

from atas import threat
from atas.attacks import APGD, FAB, Square
from atas.attacks.scheduler import Scheduler, SearchProgress, run_eagerly
from atas.attacks.search import Slots
from atas.errors import DataError
from atas.threat import Linf

SEARCHES = {
    search.name: search
    for search in (
        APGD(loss="ce", iterations=10),
        APGD(loss="dlr", iterations=10),
        APGD(loss="t", iterations=10),
        FAB(iterations=6),
        Square(queries=25),
    )
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


def make_scheduler(model, *, verifier=None, slots=8, poll_interval=3, **options):
    return Scheduler(model, verifier or model, torch.device("cpu"), slots, poll_interval, **options)


def examples_of(model, data):
    return make_scheduler(model).examples(*data)


def new_progress(search, examples):
    return SearchProgress.start(search, examples, examples.misclassified(), points=examples.x.clone())


def attacked(search, model, data, ball, *, progress=None, seed=0, on_poll=None, search_model=None, **options):
    scheduler = make_scheduler(search_model or model, **{"verifier": model} | options)
    examples = scheduler.examples(*data)
    progress = progress or new_progress(search, examples)
    scheduler.run(search, examples, ball, progress, seed=seed, on_poll=on_poll)
    return progress


def test_a_slot_does_not_depend_on_other_slots(search, model, data, small_ball):
    """The same job alone, and in another slot, beside others that began earlier or were replaced."""
    x, y, _ = data
    job = {"x": x[3:4], "y": y[3:4], "target": (y[3:4] + 2) % CLASSES, "index": torch.tensor([3]), "target_rank": 1}
    alone = Slots.empty(1, x)
    alone.assign(torch.tensor([0]), **job)
    expected, _ = course(search, alone, model, small_ball, classes=CLASSES)

    slots, seen = filled(x[10:16], y[10:16], (y[10:16] + 1) % CLASSES), []
    state = search.init_state(slots, small_ball, CLASSES, 0)
    for step in range(5 + search.steps):
        if step == 5:
            slots.assign(torch.tensor([2]), **job)
        if step == 8:
            slots.assign(torch.tensor([1]), x=x[:1], y=y[:1], target=y[:1], index=torch.tensor([0]))
            slots.occupied[4] = False
        state.step(recorded(model, seen))
        slots.broken.fill_(False)
    found = torch.stack(seen)[5 * search.queries_per_step :, 2]
    torch.testing.assert_close(found, expected[:, 0], rtol=0, atol=1e-9)
    torch.testing.assert_close(slots.point[2], alone.point[0], rtol=0, atol=1e-9)
    assert slots.iteration[2] == alone.iteration[0]


def test_steps_of_idle_slots_change_nothing(search, model, data, small_ball):
    slots = Slots.empty(3, data[0])
    before = copy.deepcopy(slots)
    state = search.init_state(slots, small_ball, CLASSES, 0)
    state.step(model)
    state.step(model)
    for field in dataclasses.fields(Slots):
        if field.name != "targeted":
            assert torch.equal(getattr(slots, field.name), getattr(before, field.name)), field.name


@pytest.mark.parametrize("shape", [(2, 4, 3), (3, 5, 7), (1, 8, 8)])
def test_slots_keep_their_layout_and_the_type_of_the_images(shape, search, small_ball):
    x = torch.rand(4, *shape)
    model = reference.Perceptron(x[0].numel(), classes=CLASSES).module.float()
    slots = filled(x, torch.arange(4), 3 - torch.arange(4))
    state = search.init_state(slots, small_ball, CLASSES, 0)
    state.step(model)
    state.step(model)
    for tensor in (slots.x, slots.point):
        assert tensor.is_contiguous()
        assert tensor.dtype == torch.float32


@pytest.mark.slow
def test_verdicts_depend_neither_on_the_slots_nor_on_the_polls(search, model, data, small_ball):
    found = [
        attacked(search, model, data, small_ball, slots=slots, poll_interval=poll_interval)
        for slots, poll_interval in ((7, 3), (2, 1), (500, 50))
    ]
    for progress in found:
        assert torch.equal(progress.broken, found[0].broken)
        assert torch.equal(model(progress.points).argmax(1) != data[1], progress.broken)
        assert small_ball.distance(progress.points, data[0]).max() <= small_ball.eps + 1e-9
        assert progress.finished[~progress.broken].all()
    assert 3 < found[0].broken.sum() < 20


def test_verdicts_are_those_of_each_job_by_itself(search, model, data, small_ball):
    x, y, index = data
    progress = attacked(search, model, data, small_ball)
    examples = examples_of(model, data)
    expected = examples.misclassified()
    for rank, target in enumerate(examples.target_classes(search).T):
        slots = filled(x, y, target, rank)
        slots.index.copy_(index)
        expected |= course(search, slots, model, small_ball, classes=CLASSES)[1]
    assert torch.equal(progress.broken, expected)


@pytest.mark.slow
def test_an_example_takes_its_random_numbers_along(model, data, small_ball):
    order = torch.randperm(20)
    search = SEARCHES["square"]
    progress = attacked(search, model, data, small_ball)
    shuffled = attacked(search, model, [part[order] for part in data], small_ball)
    torch.testing.assert_close(shuffled.points, progress.points[order], rtol=0, atol=1e-9)
    assert torch.equal(shuffled.queries_per_example, progress.queries_per_example[order])
    other_numbers = attacked(search, model, (*data[:2], data[2] + 1), small_ball)
    assert not torch.equal(other_numbers.points, progress.points)
    assert not torch.equal(attacked(search, model, data, small_ball, seed=1).points, progress.points)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [1, 4])
def test_after_a_stop_the_rest_is_done_with_the_same_verdicts(search, model, data, small_ball, stop):
    expected = attacked(search, model, data, small_ball)
    polls = []

    def interrupt(left):
        polls.append(left)
        if len(polls) == stop:
            raise KeyboardInterrupt

    examples = examples_of(model, data)
    progress = new_progress(search, examples)
    with pytest.raises(KeyboardInterrupt):
        attacked(search, model, data, small_ball, progress=progress, on_poll=interrupt, poll_interval=4)
    saved = copy.deepcopy(progress)
    resumed = attacked(search, model, data, small_ball, progress=progress)
    assert torch.equal(resumed.broken, expected.broken)
    assert (resumed.broken >= saved.broken).all()
    over = saved.broken | saved.finished.all(1)
    assert torch.equal(resumed.queries_per_example[over], saved.queries_per_example[over]), (
        "finished examples are not attacked again"
    )
    assert torch.equal(resumed.points[saved.broken], saved.points[saved.broken])


def bonus(model, y_of, size):
    """A verifier that adds `size` to the logit of the label, which it infers from the image."""

    def verifier(point):
        logits = model(point)
        return logits + size * torch.nn.functional.one_hot(y_of(point), CLASSES)

    return verifier


@pytest.mark.slow
@pytest.mark.parametrize("size", [0.05, 100.0])
def test_a_point_that_the_verifier_rejects_does_not_count_and_the_search_continues(
    search, model, data, small_ball, size
):
    x, y, index = data

    def label_of(point):
        return y[(point.unsqueeze(1) - x).flatten(2).norm(dim=2).argmin(1)]

    verifier = bonus(model, label_of, size)
    progress = attacked(search, model, data, small_ball, verifier=verifier)
    examples = examples_of(verifier, data)
    expected = examples.misclassified()
    flagged = torch.zeros(20, dtype=torch.bool)
    for rank, target in enumerate(examples.target_classes(search).T):
        slots = filled(x, y, target, rank)
        slots.index.copy_(index)
        state = search.init_state(slots, small_ball, CLASSES, 0)
        for _ in range(search.steps):
            state.step(model)
            confirmed = verifier(slots.point).argmax(1) != y
            expected |= confirmed & slots.broken
            flagged |= slots.broken
            slots.broken.fill_(False)
        expected |= verifier(small_ball.project(slots.point, x)).argmax(1) != y
    assert torch.equal(progress.broken, expected)
    assert torch.equal(verifier(progress.points).argmax(1) != y, progress.broken)
    assert (flagged & ~progress.broken).any(), "the case must hold points that are not confirmed"
    if size == 100:
        assert not progress.broken.any()
        assert progress.finished.all()


def test_a_point_outside_of_the_ball_does_not_count():
    class Leaper:
        """Claims that a far point is adversarial, and leaves it at that."""

        name, steps, queries_per_step, backward_passes = "leap", 1, 1, 0

        def num_targets(self, num_classes):
            return 0

        def init_state(self, slots, ball, num_classes, seed):
            self.slots = slots
            return self

        def step(self, logits):
            running = self.slots.running()
            self.slots.point[running] = 2.0
            for flags in (self.slots.broken, self.slots.done, self.slots.iteration):
                flags.add_(running)

    def model(point):
        darkest = point.flatten(1).amin(1)
        return torch.stack([0.7 - darkest, darkest - 0.7], 1)

    x, y = torch.full((2, 1, 2, 2), 0.5), torch.tensor([0, 0])
    x[1] = 0.65
    progress = attacked(Leaper(), model, (x, y, torch.arange(2)), Linf(0.1))
    assert progress.broken.tolist() == [False, True]
    torch.testing.assert_close(progress.points[1], torch.full((1, 2, 2), 0.75))
    assert torch.equal(progress.points[0], x[0])


def test_targets_come_in_the_order_of_the_logits_and_likely_ones_first(model, data):
    examples = examples_of(model, data)
    targets = examples.target_classes(APGD(loss="t"))
    assert targets.shape == (20, CLASSES - 1)
    for row, label, logits in zip(targets.tolist(), data[1].tolist(), model(data[0]), strict=True):
        assert row == [c for c in logits.argsort(descending=True).tolist() if c != label]
    assert torch.equal(examples.target_classes(APGD(loss="ce")), data[1].unsqueeze(1))
    progress = SearchProgress.start(APGD(loss="t"), examples, examples.misclassified())
    progress.finished[0, 0] = True
    left = [i for i in range(20) if i not in (4, 5, 11)]
    assert progress.pending_jobs().tolist() == [[0, i] for i in left[1:]] + [[rank, i] for rank in (1, 2) for i in left]


def test_queries_are_counted(search, model, data, small_ball):
    progress = attacked(search, model, data, small_ball)
    most = search.steps * search.queries_per_step * progress.finished.shape[1]
    broken_here = progress.broken & ~examples_of(model, data).misclassified()
    assert (progress.queries_per_example[[4, 5, 11]] == 0).all()
    assert (progress.queries_per_example[broken_here] > 0).all()
    assert (progress.queries_per_example[broken_here] <= most).all()
    if not isinstance(search, FAB):  # whose jobs may be over sooner
        assert (progress.queries_per_example[~progress.broken] == most).all()
    assert progress.queries_per_example[broken_here].float().mean() < 0.9 * most


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

    attacked(search, model, data, small_ball, search_model=watched, run_steps=counted)
    assert len(asked) == len(steps) * search.queries_per_step
    assert len(led_back) == len(steps) * search.backward_passes


def test_a_poll_reports_the_queries_that_are_left(search, model, data, small_ball):
    left = []
    progress = attacked(search, model, data, small_ball, on_poll=left.append)
    assert left == sorted(left, reverse=True)
    assert left[-1] == 0
    assert left[0] <= 17 * progress.finished.shape[1] * search.steps * search.queries_per_step
    assert len(left) > 3


def test_slots_are_full_while_there_are_jobs(model, data, small_ball):
    search, seen = APGD(loss="ce", iterations=10), []
    progress = attacked(search, model, data, small_ball, search_model=recorded(model, seen), slots=3, poll_interval=1)
    assert {len(point) for point in seen} == {3}
    assert progress.queries_per_example.sum() >= 3 * (len(seen) - search.steps), (
        "slots are idle only during the last jobs"
    )


@pytest.mark.slow
def test_another_step_runner_may_warm_up(search, model, data, small_ball):
    counts = []

    def warm(step):
        step()
        step()
        plain = run_eagerly(step)

        def times(count):
            counts.append(count)
            plain(count)

        return times

    found = attacked(search, model, data, small_ball, run_steps=warm, poll_interval=4)
    expected = attacked(search, model, data, small_ball, poll_interval=4)
    assert set(counts) <= {1, 2, 3, 4}
    for name in ("broken", "finished", "queries_per_example", "points"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_without_a_job_nothing_happens(search, model, data, small_ball):
    def never(*_):
        raise AssertionError

    examples = examples_of(model, data)
    progress = SearchProgress.start(search, examples, torch.ones(20, dtype=torch.bool))
    make_scheduler(never).run(search, examples, small_ball, progress, on_poll=never)


def test_labels_that_the_model_does_not_have_are_refused(model, data):
    with pytest.raises(DataError, match="outside of"):
        examples_of(model, (data[0], data[1] + 3, data[2]))


@pytest.mark.parametrize("slots", [8, 60])
def test_every_example_is_reported_and_none_after_it_is_broken(search, model, data, small_ball, slots):
    """Several targets of an example may end at one poll, one of them with success: the others are not reported."""
    scheduler = make_scheduler(model, slots=slots, poll_interval=7)
    examples = scheduler.examples(*data)
    progress, broken, reported = new_progress(search, examples), set(), set()

    def on_verified(rows, points, logits):
        torch.testing.assert_close(logits, model(points))
        fooled = ~examples.select(rows).resists(logits)
        for row, is_broken in zip(rows.tolist(), fooled.tolist(), strict=True):
            assert row not in broken
            reported.add(row)
            broken.update({row} if is_broken else set())

    scheduler.run(search, examples, small_ball, progress, on_verified=on_verified)
    attacked = ~examples.misclassified()
    assert broken == set((progress.broken & attacked).nonzero().flatten().tolist())
    assert reported == set(attacked.nonzero().flatten().tolist())
    assert 0 < len(broken) < len(reported)
