"""The searches' functions by hand against those that they stand for, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import copy
import dataclasses
import os

import pytest
import torch
from torch import nn

import atas
from atas import threat
from atas.attacks import apgd, fab, losses, projected_gradient_descent, search, square
from atas.attacks.apgd import APGD
from atas.attacks.fab import FAB
from atas.attacks.scheduler import Scheduler, SearchProgress
from atas.attacks.search import Slots
from atas.attacks.square import Square
from atas.core.dispatch import use_fast_ops

ON_GPU = torch.cuda.is_available()
if not ON_GPU:
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton", reason="the kernels need Triton, which comes with PyTorch for CUDA")
kernels = pytest.importorskip("atas.ops.triton")
fab_kernels = pytest.importorskip("atas.ops.triton.fab")

DEVICE = "cuda" if ON_GPU else "cpu"
EPS = 8 / 255
BALL = atas.Linf(EPS)
BATCHES = [(1, (3, 8, 8)), (40, (1, 8, 8)), (40, (3, 5, 7)), (12, (3, 32, 32))]
STEPS = 12
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def by_hand():
    """Run a function in its form by hand; it has to cover the arguments."""

    def run(function, *args):
        found = kernels.attack_kernels()[function](*args)
        assert found is not NotImplemented
        return found

    return run


def randn(*shape):
    return torch.randn(*shape, device=DEVICE)


def chance(count, share):
    return torch.rand(count, device=DEVICE) < share


def images(count, shape):
    """With many pixels at the ends of [0, 1]."""
    return (torch.rand(count, *shape, device=DEVICE) * 1.5 - 0.25).clamp(0, 1)


def near(x, eps=EPS):
    return BALL.project(x + (2 * torch.rand_like(x) - 1) * eps, x) if eps else x.clone()


@pytest.fixture(params=BATCHES, ids=str)
def lanes(request):
    """Lanes at all sorts of times: fresh ones, some that are about to end, and some that do not move."""
    count, shape = request.param
    x, numbers = images(count, shape), torch.randperm(1000, device=DEVICE)[:count]
    clock = torch.randint(STEPS, (count,), device=DEVICE) * chance(count, 0.8)
    clock[:3] = torch.tensor([0, STEPS - 1, 1], device=DEVICE)[:count]
    return Slots(
        x=x,
        y=numbers % 10,
        target=(numbers + 1) % 10,
        example=numbers * 2**20,
        rank=numbers % 9,
        clock=clock,
        active=~chance(count, 0.1) | (torch.arange(count, device=DEVICE) == 0),
        point=near(x),
        broken=chance(count, 0.1) & (clock > 0),
        done=chance(count, 0.1) & (clock > 0),
    )


def assert_same(found, expected, close=()):
    """Every tensor to the bit, but for those that are named."""
    for field in dataclasses.fields(found):
        ours, theirs = getattr(found, field.name), getattr(expected, field.name)
        assert ours.dtype == theirs.dtype
        rtol = 3e-7 if field.name in close else 0
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=0, equal_nan=True, msg=field.name)


def awkward(gradient):
    """With zeros, and with entries that are not numbers."""
    gradient = gradient * (torch.rand_like(gradient) > 0.1)
    flat = gradient.view(-1)
    flat[1:4] = torch.tensor([NAN, INF, -INF], device=DEVICE)
    return gradient


@pytest.mark.parametrize("seed", [0, 12345678901234567])
@pytest.mark.parametrize("each", [False, True])
def test_starts_are_drawn_to_the_bit_and_only_where_a_lane_is_fresh(by_hand, lanes, seed, each):
    epoch = lanes.rank if each else torch.tensor(3, device=DEVICE)
    arguments = BALL, lanes, seed, epoch, near(lanes.x)
    found, expected = by_hand(search.random_start, *arguments), search.random_start(*arguments)
    assert torch.equal(found, expected)
    assert torch.equal(found[lanes.clock > 0], arguments[-1][lanes.clock > 0])


def test_a_start_alone_has_an_epoch_for_each_example(lanes):
    arguments = BALL, lanes.x, 5, lanes.rank, lanes.example
    found = kernels.training_kernels()[threat.random_start](*arguments)
    assert torch.equal(found, threat.random_start(*arguments))


@pytest.mark.parametrize("size", [EPS / 5, 0.5])
def test_pgd_moves(by_hand, lanes, size):
    theirs = copy.deepcopy(lanes)
    arguments = near(lanes.x), awkward(randn(*lanes.x.shape)), size, STEPS
    assert by_hand(projected_gradient_descent.pgd_update, BALL, lanes, *arguments) is None
    projected_gradient_descent.pgd_update(BALL, theirs, *arguments)
    assert_same(lanes, theirs)


@pytest.mark.parametrize("passes", [1, 20])
@pytest.mark.parametrize("always", [False, True], ids=["windows", "every"])
def test_apgd_moves(by_hand, lanes, passes, always):
    """`always` looks at the step size after every step, which has all its branches taken."""
    count = len(lanes)
    best = randn(count)
    climb = apgd.APGDBuffers(
        current=near(lanes.x),
        previous=near(lanes.x),
        best_point=near(lanes.x),
        best_gradient=randn(*lanes.x.shape),
        loss=randn(count),
        best_loss=best,
        checked_loss=torch.where(chance(count, 0.5), best, best - 1),
        size=torch.rand(count, device=DEVICE) * EPS,
        rises=torch.randint(4, (count,), device=DEVICE),
        halved=chance(count, 0.5),
    )
    table = torch.tensor([0] + [2] * (STEPS - 1) if always else apgd.checkpoints(STEPS - 1), device=DEVICE)
    loss = best + randn(count) * (torch.rand(count, device=DEVICE) < 0.7)
    loss[:2] = torch.tensor([NAN, INF], device=DEVICE)[:count]
    gradient = awkward(randn(*lanes.x.shape)).to(memory_format=torch.channels_last)
    theirs, their_climb = copy.deepcopy(lanes), copy.deepcopy(climb)
    arguments = table, passes, near(lanes.x), loss, gradient, ~chance(count, 0.2)
    for _ in range(3):
        assert by_hand(apgd.apgd_update, BALL, lanes, climb, *arguments) is None
        apgd.apgd_update(BALL, theirs, their_climb, *arguments)
        assert_same(lanes, theirs)
        assert_same(climb, their_climb, close=("best_gradient",) if passes > 1 else ())


@pytest.mark.parametrize("seed", [0, 12345678901234567])
@pytest.mark.parametrize("eps", [EPS, 0.7])
def test_squares_are_proposed_to_the_bit(by_hand, lanes, seed, eps):
    longest = min(lanes.x.shape[2:])
    sides = torch.randint(1, longest + 1, (STEPS,), device=DEVICE)
    sides[1:3] = torch.tensor([1, longest], device=DEVICE)
    found, expected = (
        by_hand(square.linf_proposal, eps, seed, lanes, sides),
        square.linf_proposal(eps, seed, lanes, sides),
    )
    assert torch.equal(found, expected)


def test_square_keeps_what_is_better(by_hand, lanes):
    count = len(lanes)
    least, theirs = randn(count), copy.deepcopy(lanes)
    their_least, margin = least.clone(), least + randn(count)
    margin[0] = NAN
    arguments = near(lanes.x), margin, ~chance(count, 0.2)
    assert by_hand(square.square_update, STEPS, lanes, least, *arguments) is None
    square.square_update(STEPS, theirs, their_least, *arguments)
    assert_same(lanes, theirs)
    torch.testing.assert_close(least, their_least, rtol=0, atol=0, equal_nan=True)


def test_fab_keeps_what_is_closer(by_hand, lanes):
    count, search = len(lanes), FAB(STEPS)
    closest = torch.where(chance(count, 0.3), INF, torch.rand(count, device=DEVICE) * 2 * EPS)
    far = images(count, lanes.x.shape[1:])
    ahead = torch.where(chance(count, 0.5).view(-1, 1, 1, 1), far, near(lanes.x)).contiguous()
    current, theirs = near(lanes.x), copy.deepcopy(lanes)
    their_closest, their_current = closest.clone(), current.clone()
    right = ~chance(count, 0.5)
    assert by_hand(fab.fab_update, search, BALL, lanes, current, closest, ahead, right) is None
    fab.fab_update(search, BALL, theirs, their_current, their_closest, ahead, right)
    assert_same(lanes, theirs)
    assert torch.equal(current, their_current)
    assert torch.equal(closest, their_closest)


@pytest.fixture(params=[False, True], ids=["in registers", "in blocks"])
def in_blocks(request, monkeypatch):
    """As it is, and as if a program's registers held four entries of an image."""
    if request.param:
        monkeypatch.setattr(fab_kernels, "_MAX_IN_REGISTERS", 4)
        monkeypatch.setattr(fab_kernels, "_BLOCK_LARGE", 64)


def ahead_exactly(point, x, gradient, lead, **options):
    """`_fab._ahead` in float64."""
    gradient, lead = gradient.nan_to_num(), lead.nan_to_num()
    return fab.boundary_step(BALL, *(part.double() for part in (point, x, gradient, lead)), *options.values())


@pytest.mark.usefixtures("in_blocks")
@pytest.mark.parametrize("share", [0.001, 0.1, 0.9, 1.5])
@pytest.mark.parametrize("spread", [0, 3], ids=["even", "heavy"])
def test_fab_goes_to_the_boundary(by_hand, lanes, share, spread):
    """Goals from nearby to out of reach; gradients that are even, and some of which few pixels make up the most."""
    x, point = lanes.x, near(lanes.x, 0.3)
    gradient = randn(*x.shape) * randn(*x.shape).abs() ** spread
    gradient[: len(x) // 3] *= 1e-6
    reach = (torch.where(gradient > 0, point, 1 - point) * gradient.abs()).sum((1, 2, 3))
    lead = -reach * share * torch.rand(len(x), device=DEVICE)
    lead[1::4] *= -1
    found = by_hand(fab.boundary_step, BALL, point, x, gradient, lead, 1.05, 0.1)
    expected = ahead_exactly(point, x, gradient, lead, eta=1.05, alpha_max=0.1)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=5e-6)
    sorted_by_torch = fab.boundary_step(BALL, point, x, gradient, lead, 1.05, 0.1)
    torch.testing.assert_close(found, sorted_by_torch, rtol=0, atol=2e-5)


def awkward_boundaries():
    """What is hard about a linear problem, one a row: points, images, gradients, leads and what they are."""
    shape, rows = (3, 6, 6), []
    corner, even = torch.zeros(shape), torch.full(shape, 0.25)
    ones, some, noise = torch.ones(shape), torch.rand(shape), torch.randn(shape)
    one = torch.zeros(shape)
    one[1, 2, 3] = -2.0
    orders = noise.sign() * 10.0 ** (torch.rand(shape) * 30 - 20)
    unfit = noise.clone()
    unfit[0, 0, :3] = torch.tensor([NAN, INF, -INF])
    steps = torch.linspace(0, 1, some.numel()).view(shape)
    rows.append(("no gradient", some, some, 0 * ones, -1.0))
    rows.append(("already there", some, some, noise, 0.0))
    rows.append(("no room at all", corner, corner, ones, 3.0))
    rows.append(("all meet their ends at once", even, even, ones, 13.5))
    rows.append(("all meet their ends at once, before the goal", even, even, ones, 27.0))
    rows.append(("all meet their ends at once, beyond the goal", even, even, ones, 28.0))
    rows.append(("a single pixel", some, some, one, -0.3))
    rows.append(("a single pixel, out of reach", some, some, one, -30.0))
    rows.append(("thirty orders of magnitude", some, some, orders, -1e8))
    rows.append(("thirty orders of magnitude, nearly all of them", some, some, orders, -0.9999 * orders.abs().sum()))
    rows.append(("subnormal", some, some, noise * 1e-41, -1e-40))
    rows.append(("huge", some, some, noise * 1e36, 1e37))
    rows.append(("a tiny gradient", some, some, noise * 1e-30, 1.0))
    rows.append(("no numbers in the gradient", some, some, unfit, -1.0))
    rows.append(("an infinite lead", some, some, noise, INF))
    rows.append(("no number for a lead", some, some, noise, NAN))
    rows.append(("one after the other", steps, steps, steps.exp(), 60.0))
    rows.append(("the other way from the image", some, (some + 0.3 * noise.sign()).clamp(0, 1), noise, -2.0))
    return rows


@pytest.mark.usefixtures("in_blocks")
@pytest.mark.parametrize("case", awkward_boundaries(), ids=lambda case: case[0])
def test_fab_goes_to_awkward_boundaries(by_hand, case):
    _, *parts, lead = case
    point, x, gradient = (part[None].to(DEVICE) for part in parts)
    lead = torch.tensor([float(lead)], device=DEVICE)
    found = by_hand(fab.boundary_step, BALL, point, x, gradient, lead, 1.05, 0.1)
    expected = ahead_exactly(point, x, gradient, lead, eta=1.05, alpha_max=0.1)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=5e-6)


@pytest.mark.usefixtures("in_blocks")
def test_fab_arrives_even_where_every_pixel_meets_its_end_alone(by_hand):
    """Rooms and slopes in geometric sequences: the lines are as different as can be."""
    pixels = torch.arange(64.0, device=DEVICE).view(1, 1, 8, 8)
    for room in (0.5, 0.9, 0.99):
        for slope in (0.3, 0.7, 0.99, 1.0):
            point, gradient = room**pixels, slope ** (63 - pixels)
            for share in (0.1, 0.9, 0.999):
                lead = (point * gradient).sum((1, 2, 3)) * share
                found = by_hand(fab.boundary_step, BALL, point, point, gradient, lead, 1.0, 0.1)
                left = lead - ((point - found) * gradient).sum((1, 2, 3))
                assert left.abs() <= 2e-6 * gradient.amax() * 8


def checked_losses(by_hand, function, arguments, logits, rtol=2e-6):
    """Values, and gradients for weights of each row."""
    theirs, ours = (logits.clone().requires_grad_() for _ in range(2))
    expected, found = function(*arguments(theirs)), by_hand(function, *arguments(ours))
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-6)
    weights = randn(len(logits))
    expected, found = (
        torch.autograd.grad(loss, z, weights)[0] for loss, z in ((expected, theirs), (found, ours))
    )  # fmt: skip
    assert found.dtype == logits.dtype
    close = {"rtol": 1e-5, "atol": 1e-6} if logits.dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-2}
    torch.testing.assert_close(found, expected, **close)
    plain = by_hand(function, *arguments(logits))
    assert not plain.requires_grad
    torch.testing.assert_close(plain, function(*arguments(logits)), rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("kind", ["ce", "dlr", "t"])
@pytest.mark.parametrize(("rows", "classes"), [(1, 2), (9, 3), (9, 4), (130, 10), (37, 100), (3, 256)])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_losses(by_hand, kind, rows, classes, precision):
    logits = (torch.rand(rows, classes, device=DEVICE).argsort(1) / 8).to(precision)  # without ties
    y = torch.randint(classes, (rows,), device=DEVICE)
    target = (y + torch.randint(1, classes, (rows,), device=DEVICE)) % classes
    checked_losses(by_hand, losses.attack_loss, lambda z: (kind, z, y, target), logits)


@pytest.mark.parametrize(("rows", "classes"), [(1, 2), (9, 3), (130, 10), (37, 100)])
def test_lead_and_margin(by_hand, rows, classes):
    logits = torch.randint(-3, 4, (rows, classes), device=DEVICE).float()  # many ties
    y = torch.randint(classes, (rows,), device=DEVICE)
    target = torch.randint(classes, (rows,), device=DEVICE)
    checked_losses(by_hand, losses.target_margin, lambda z: (z, y, target), logits, rtol=0)
    checked_losses(by_hand, losses.margin, lambda z: (z, y), logits, rtol=0)
    assert torch.equal(by_hand(losses.correct, logits, y), losses.correct(logits, y))
    best = logits.argmax(1)
    assert by_hand(losses.correct, logits, best).all()


@pytest.mark.parametrize("kind", ["dlr", "t"])
@pytest.mark.parametrize("classes", [3, 4, 10])
def test_losses_of_logits_with_ties(by_hand, kind, classes):
    """Which of two equal logits the gradient goes to is up to torch, but not how much goes to both."""
    logits = torch.randint(-1, 2, (60, classes), device=DEVICE).float()
    logits[:, 0] += 3  # so that no spread is zero
    y, target = torch.randint(classes, (2, 60), device=DEVICE)
    theirs, ours = (logits.clone().requires_grad_() for _ in range(2))
    expected, found = losses.attack_loss(kind, theirs, y, target), by_hand(losses.attack_loss, kind, ours, y, target)
    torch.testing.assert_close(found, expected)
    expected.sum().backward()
    found.sum().backward()
    for level in range(-1, 5):
        parts = (torch.where(logits == level, z.grad, 0).sum(1) for z in (ours, theirs))
        torch.testing.assert_close(*parts, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_losses_of_logits_that_are_no_numbers(by_hand, bad, place):
    logits = torch.tensor([[1.0, 2.0, 0.5, 0.1, -1.0], [3.0, 1.0, 2.0, 0.0, 5.0]], device=DEVICE)
    logits[0, place] = bad
    y, target = torch.tensor([0, 1], device=DEVICE), torch.tensor([1, 2], device=DEVICE)
    for function, arguments in (
        *((losses.attack_loss, (kind, logits, y, target)) for kind in ("ce", "dlr", "t")),
        (losses.target_margin, (logits, y, target)),
        (losses.margin, (logits, y)),
        (losses.correct, (logits, y)),
    ):
        found, expected = by_hand(function, *arguments), function(*arguments)
        torch.testing.assert_close(found, expected, equal_nan=True, msg=f"{function.__name__}{arguments[:1]}")


def test_second_derivatives_are_refused(by_hand):
    logits, y = torch.randn(3, 4, device=DEVICE, requires_grad=True), torch.zeros(3, dtype=torch.long, device=DEVICE)
    loss = by_hand(losses.attack_loss, "dlr", logits, y, y).sum()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, logits, create_graph=True)


def test_what_is_not_covered_is_left_to_others():
    functions = kernels.attack_kernels()
    x, ball = torch.rand(2, 3, 4, 4, device=DEVICE), atas.L2(1.0)
    lanes, doubles = Slots.empty(2, x), Slots.empty(2, x.double())
    slanted = dataclasses.replace(lanes, point=lanes.point.to(memory_format=torch.channels_last))
    numbers, flags, now = x[:, 0, 0, 0].clone(), lanes.done, torch.tensor(0, device=DEVICE)
    climb = APGD("ce", 5).begin(lanes, BALL, 4, 0)._climb
    table, y, z = torch.zeros(6, dtype=torch.long, device=DEVICE), lanes.y, x[:, 0, 0]
    for function, *arguments in [
        (search.random_start, ball, lanes, 0, now, x),
        (search.random_start, BALL, doubles, 0, now, x.double()),
        (search.random_start, BALL, slanted, 0, now, slanted.point),
        (projected_gradient_descent.pgd_update, ball, lanes, x, x, 0.1, 5),
        (projected_gradient_descent.pgd_update, BALL, doubles, x.double(), x.double(), 0.1, 5),
        (projected_gradient_descent.pgd_update, BALL, slanted, x, x, 0.1, 5),
        (apgd.apgd_update, ball, lanes, climb, table, 1, x, numbers, x, flags),
        (apgd.apgd_update, BALL, lanes, climb, table, 1, x, numbers.double(), x, flags),
        (square.linf_proposal, EPS, 0, doubles, table),
        (square.square_update, 5, lanes, numbers.double(), x, numbers, flags),
        (fab.fab_update, FAB(), ball, lanes, x, numbers, x, flags),
        (fab.boundary_step, ball, x, x, x, numbers, 1.05, 0.1),
        (losses.attack_loss, "ce", z.double(), y, y),
        (losses.attack_loss, "ce", z, y.int(), y.int()),
        (losses.margin, torch.zeros(2, 5000, device=DEVICE), y),
        (losses.correct, z.double(), y),
    ]:
        assert functions[function](*arguments) is NotImplemented, function.__name__


@pytest.fixture(scope="module")
def problem():
    """A small network that is right about most of a few images, and the labels."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.Softplus(), nn.Flatten(), nn.Linear(6 * 16, 5)
    model = nn.Sequential(*layers).to(DEVICE).requires_grad_(False)
    model[3].weight.mul_(4)
    x = images(9, (3, 8, 8))
    y = model(x).argmax(1)
    y[3] = (y[3] + 1) % 5
    return model, x, y


SEARCHES = {
    "apgd-ce": (APGD("ce", 9), [search.random_start, losses.attack_loss, apgd.apgd_update, losses.correct]),
    "apgd-dlr": (APGD("dlr", 6, passes=2), [search.random_start, losses.attack_loss, apgd.apgd_update, losses.correct]),
    "apgd-t": (APGD("t", 9), [search.random_start, losses.attack_loss, apgd.apgd_update, losses.correct]),
    "pgd": (
        projected_gradient_descent.PGDRestart(6, restart=1),
        [search.random_start, projected_gradient_descent.pgd_update],
    ),
    "square": (Square(16), [square.linf_proposal, losses.margin, square.square_update, losses.correct]),
    "fab-t": (FAB(5), [losses.target_margin, fab.boundary_step, fab.fab_update, losses.correct]),
}


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("eps", [0.02, 0.06])
def test_whole_searches(problem, name, eps):
    """Few lanes and looks at odd times, so that lanes are at different times, some of them idle."""
    (model, x, y), (search, functions) = problem, SEARCHES[name]
    ball, used = atas.Linf(eps), set()

    def noted(function, form):
        def call(*args):
            used.add(function)
            found = form(*args)
            assert found is not NotImplemented or function not in functions
            return found

        return call

    def attacked():
        scheduler = Scheduler(model, model, x.device, slots=6, poll_interval=3)
        examples = scheduler.examples(x, y, torch.arange(len(x)))
        progress = SearchProgress.start(search, examples, examples.misclassified(), points=x.clone())
        scheduler.run(search, examples, ball, progress, seed=3)
        return progress

    expected = attacked()
    forms = {**kernels.training_kernels(), **kernels.attack_kernels()}
    with use_fast_ops(None, kernels={function: noted(function, form) for function, form in forms.items()}):
        found = attacked()
    assert used >= set(functions)
    assert torch.equal(found.broken, expected.broken)
    assert torch.equal(found.finished, expected.finished)
    assert torch.equal(found.queries_per_example, expected.queries_per_example)
    torch.testing.assert_close(found.points, expected.points, rtol=0, atol=2e-5 if name == "fab-t" else 1e-6)
    assert not found.broken.all() or eps > 0.03
    assert (found.broken & (found.queries_per_example > 0)).any() or eps < 0.03
