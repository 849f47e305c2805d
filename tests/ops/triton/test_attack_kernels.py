"""The searches' functions by hand against those that they stand for, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from helpers.kernels import DEVICE, KERNELS, count_kernel_calls, run_kernel
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
from atas.ops.triton import fab as fab_kernels

EPS = 8 / 255
BALL = atas.Linf(EPS)
BATCHES = [(1, (3, 8, 8)), (40, (1, 8, 8)), (40, (3, 5, 7)), (12, (3, 32, 32))]
STEPS = 12
NAN, INF = float("nan"), float("inf")


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
def slots(request):
    """Slots at all sorts of times: fresh ones, some that are about to end, and some that do not move."""
    count, shape = request.param
    x, numbers = images(count, shape), torch.randperm(1000, device=DEVICE)[:count]
    clock = torch.randint(STEPS, (count,), device=DEVICE) * chance(count, 0.8)
    clock[:3] = torch.tensor([0, STEPS - 1, 1], device=DEVICE)[:count]
    return Slots(
        x=x,
        y=numbers % 10,
        target=(numbers + 1) % 10,
        index=numbers * 2**20,
        target_rank=numbers % 9,
        iteration=clock,
        occupied=~chance(count, 0.1) | (torch.arange(count, device=DEVICE) == 0),
        point=near(x),
        broken=chance(count, 0.1) & (clock > 0),
        done=chance(count, 0.1) & (clock > 0),
    )


def assert_same(found, expected, close=()):
    """Every tensor to the bit, but for those that are named."""
    for field in dataclasses.fields(found):
        ours, theirs = getattr(found, field.name), getattr(expected, field.name)
        if not isinstance(ours, torch.Tensor):
            continue
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
def test_starts_are_drawn_to_the_bit_and_only_where_a_lane_is_fresh(slots, seed, each):
    epoch = slots.target_rank if each else torch.tensor(3, device=DEVICE)
    arguments = BALL, slots, seed, epoch, near(slots.x)
    found, expected = run_kernel(search.random_start, *arguments), search.random_start(*arguments)
    assert torch.equal(found, expected)
    assert torch.equal(found[slots.iteration > 0], arguments[-1][slots.iteration > 0])


def test_a_start_alone_has_an_epoch_for_each_example(slots):
    arguments = BALL, slots.x, 5, slots.target_rank, slots.index
    found = KERNELS[threat.random_start](*arguments)
    assert torch.equal(found, threat.random_start(*arguments))


@pytest.mark.parametrize("size", [EPS / 5, 0.5])
def test_pgd_moves(slots, size):
    theirs = copy.deepcopy(slots)
    arguments = near(slots.x), awkward(randn(*slots.x.shape)), size, STEPS
    assert run_kernel(projected_gradient_descent.pgd_update, BALL, slots, *arguments) is None
    projected_gradient_descent.pgd_update(BALL, theirs, *arguments)
    assert_same(slots, theirs)


@pytest.mark.parametrize("passes", [1, 20])
@pytest.mark.parametrize("always", [False, True], ids=["windows", "every"])
def test_apgd_moves(slots, passes, always):
    """`always` looks at the step size after every step, which has all its branches taken."""
    count = len(slots)
    best = randn(count)
    climb = apgd.APGDBuffers(
        current=near(slots.x),
        previous=near(slots.x),
        best_point=near(slots.x),
        best_gradient=randn(*slots.x.shape),
        loss=randn(count),
        best_loss=best,
        checkpoint_loss=torch.where(chance(count, 0.5), best, best - 1),
        step_size=torch.rand(count, device=DEVICE) * EPS,
        increases=torch.randint(4, (count,), device=DEVICE),
        halved=chance(count, 0.5),
    )
    table = torch.tensor([0] + [2] * (STEPS - 1) if always else apgd.checkpoints(STEPS - 1), device=DEVICE)
    loss = best + randn(count) * (torch.rand(count, device=DEVICE) < 0.7)
    loss[:2] = torch.tensor([NAN, INF], device=DEVICE)[:count]
    gradient = awkward(randn(*slots.x.shape)).to(memory_format=torch.channels_last)
    theirs, their_climb = copy.deepcopy(slots), copy.deepcopy(climb)
    arguments = table, passes, near(slots.x), loss, gradient, ~chance(count, 0.2)
    for _ in range(3):
        assert run_kernel(apgd.apgd_update, BALL, slots, climb, *arguments) is None
        apgd.apgd_update(BALL, theirs, their_climb, *arguments)
        assert_same(slots, theirs)
        assert_same(climb, their_climb, close=("best_gradient",) if passes > 1 else ())


@pytest.mark.parametrize("seed", [0, 12345678901234567])
@pytest.mark.parametrize("eps", [EPS, 0.7])
def test_squares_are_proposed_to_the_bit(slots, seed, eps):
    longest = min(slots.x.shape[2:])
    sides = torch.randint(1, longest + 1, (STEPS,), device=DEVICE)
    sides[1:3] = torch.tensor([1, longest], device=DEVICE)
    found, expected = (
        run_kernel(square.linf_proposal, eps, seed, slots, sides),
        square.linf_proposal(eps, seed, slots, sides),
    )
    assert torch.equal(found, expected)


def test_square_keeps_what_is_better(slots):
    count = len(slots)
    least, theirs = randn(count), copy.deepcopy(slots)
    their_least, margin = least.clone(), least + randn(count)
    margin[0] = NAN
    arguments = near(slots.x), margin, ~chance(count, 0.2)
    assert run_kernel(square.square_update, STEPS, slots, least, *arguments) is None
    square.square_update(STEPS, theirs, their_least, *arguments)
    assert_same(slots, theirs)
    torch.testing.assert_close(least, their_least, rtol=0, atol=0, equal_nan=True)


def test_fab_keeps_what_is_closer(slots):
    count, search = len(slots), FAB(iterations=STEPS)
    closest = torch.where(chance(count, 0.3), INF, torch.rand(count, device=DEVICE) * 2 * EPS)
    far = images(count, slots.x.shape[1:])
    ahead = torch.where(chance(count, 0.5).view(-1, 1, 1, 1), far, near(slots.x)).contiguous()
    current, theirs = near(slots.x), copy.deepcopy(slots)
    their_closest, their_current = closest.clone(), current.clone()
    right = ~chance(count, 0.5)
    assert run_kernel(fab.fab_update, search, BALL, slots, current, closest, ahead, right) is None
    fab.fab_update(search, BALL, theirs, their_current, their_closest, ahead, right)
    assert_same(slots, theirs)
    assert torch.equal(current, their_current)
    assert torch.equal(closest, their_closest)


@pytest.fixture(params=[False, True], ids=["in registers", "in blocks"])
def in_blocks(request, monkeypatch):
    """As it is, and as if a program's registers held four entries of an image: then in at least three blocks."""
    if request.param:
        large = "slots" in request.fixturenames and request.getfixturevalue("slots").x[0].numel() > 1024
        monkeypatch.setattr(fab_kernels, "MAX_IN_REGISTERS", 4)
        monkeypatch.setattr(fab_kernels, "BLOCK_LARGE", 1024 if large else 64)  # few: the interpreter is slow


def ahead_exactly(point, x, gradient, lead, **options):
    """`_fab._ahead` in float64."""
    gradient, lead = gradient.nan_to_num(), lead.nan_to_num()
    return fab.boundary_step(BALL, *(part.double() for part in (point, x, gradient, lead)), *options.values())


@pytest.mark.usefixtures("in_blocks")
@pytest.mark.parametrize("share", [0.001, 0.1, 0.9, 1.5])
@pytest.mark.parametrize("spread", [0, 3], ids=["even", "heavy"])
def test_fab_goes_to_the_boundary(slots, share, spread):
    """Goals from nearby to out of reach; gradients that are even, and some of which few pixels make up the most."""
    x, point = slots.x, near(slots.x, 0.3)
    gradient = randn(*x.shape) * randn(*x.shape).abs() ** spread
    gradient[: len(x) // 3] *= 1e-6
    reach = (torch.where(gradient > 0, point, 1 - point) * gradient.abs()).sum((1, 2, 3))
    lead = -reach * share * torch.rand(len(x), device=DEVICE)
    lead[1::4] *= -1
    found = run_kernel(fab.boundary_step, BALL, point, x, gradient, lead, 1.05, 0.1)
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
def test_fab_goes_to_awkward_boundaries(case):
    _, *parts, lead = case
    point, x, gradient = (part[None].to(DEVICE) for part in parts)
    lead = torch.tensor([float(lead)], device=DEVICE)
    found = run_kernel(fab.boundary_step, BALL, point, x, gradient, lead, 1.05, 0.1)
    expected = ahead_exactly(point, x, gradient, lead, eta=1.05, alpha_max=0.1)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=5e-6)


@pytest.mark.usefixtures("in_blocks")
def test_fab_arrives_even_where_every_pixel_meets_its_end_alone():
    """Rooms and slopes in geometric sequences: the lines are as different as can be."""
    pixels = torch.arange(64.0, device=DEVICE).view(1, 1, 8, 8)
    for room in (0.5, 0.9, 0.99):
        for slope in (0.3, 0.7, 0.99, 1.0):
            point, gradient = room**pixels, slope ** (63 - pixels)
            for share in (0.1, 0.9, 0.999):
                lead = (point * gradient).sum((1, 2, 3)) * share
                found = run_kernel(fab.boundary_step, BALL, point, point, gradient, lead, 1.0, 0.1)
                left = lead - ((point - found) * gradient).sum((1, 2, 3))
                assert left.abs() <= 2e-6 * gradient.amax() * 8


def checked_losses(function, arguments, logits, rtol=2e-6):
    """Values, and gradients for weights of each row."""
    theirs, ours = (logits.clone().requires_grad_() for _ in range(2))
    expected, found = function(*arguments(theirs)), run_kernel(function, *arguments(ours))
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-6)
    weights = randn(len(logits))
    expected, found = (
        torch.autograd.grad(loss, z, weights)[0] for loss, z in ((expected, theirs), (found, ours))
    )  # fmt: skip
    assert found.dtype == logits.dtype
    close = {"rtol": 1e-5, "atol": 1e-6} if logits.dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-2}
    torch.testing.assert_close(found, expected, **close)
    plain = run_kernel(function, *arguments(logits))
    assert not plain.requires_grad
    torch.testing.assert_close(plain, function(*arguments(logits)), rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("kind", ["ce", "dlr", "t"])
@pytest.mark.parametrize(("rows", "classes"), [(1, 2), (9, 3), (9, 4), (130, 10), (37, 100), (3, 256)])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_losses(kind, rows, classes, precision):
    logits = (torch.rand(rows, classes, device=DEVICE).argsort(1) / 8).to(precision)  # without ties
    y = torch.randint(classes, (rows,), device=DEVICE)
    target = (y + torch.randint(1, classes, (rows,), device=DEVICE)) % classes
    checked_losses(losses.attack_loss, lambda z: (kind, z, y, target), logits)


@pytest.mark.parametrize(("rows", "classes"), [(1, 2), (9, 3), (130, 10), (37, 100)])
def test_lead_and_margin(rows, classes):
    logits = torch.randint(-3, 4, (rows, classes), device=DEVICE).float()  # many ties
    y = torch.randint(classes, (rows,), device=DEVICE)
    target = torch.randint(classes, (rows,), device=DEVICE)
    checked_losses(losses.target_margin, lambda z: (z, y, target), logits, rtol=0)
    checked_losses(losses.margin, lambda z: (z, y), logits, rtol=0)
    assert torch.equal(run_kernel(losses.correct, logits, y), losses.correct(logits, y))
    best = logits.argmax(1)
    assert run_kernel(losses.correct, logits, best).all()


@pytest.mark.parametrize("kind", ["dlr", "t"])
@pytest.mark.parametrize("classes", [3, 4, 10])
def test_losses_of_logits_with_ties(kind, classes):
    """Which of two equal logits the gradient goes to is up to torch, but not how much goes to both."""
    logits = torch.randint(-1, 2, (60, classes), device=DEVICE).float()
    logits[:, 0] += 3  # so that no spread is zero
    y, target = torch.randint(classes, (2, 60), device=DEVICE)
    theirs, ours = (logits.clone().requires_grad_() for _ in range(2))
    expected, found = losses.attack_loss(kind, theirs, y, target), run_kernel(losses.attack_loss, kind, ours, y, target)
    torch.testing.assert_close(found, expected)
    expected.sum().backward()
    found.sum().backward()
    for level in range(-1, 5):
        parts = (torch.where(logits == level, z.grad, 0).sum(1) for z in (ours, theirs))
        torch.testing.assert_close(*parts, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["ce", "dlr", "t"])
@pytest.mark.parametrize("precision", [torch.float32, torch.float16])
def test_losses_of_logits_far_apart(kind, precision):
    """Margins that no exponential holds, and differences that are nearly zero."""
    values = torch.tensor([-6e4, -1e4, -105.0, 0.0, 1e-6, 1.0, 88.8, 105.0, 1e4, 6e4], device=DEVICE)
    logits = values[torch.rand(40, 10, device=DEVICE).argsort(1)[:, :5]].to(precision)  # without ties
    y = torch.randint(5, (40,), device=DEVICE)
    target = (y + torch.randint(1, 5, (40,), device=DEVICE)) % 5
    checked_losses(losses.attack_loss, lambda z: (kind, z, y, target), logits)
    (gradient,) = torch.autograd.grad(
        run_kernel(losses.attack_loss, kind, logits.requires_grad_(), y, target).sum(), logits
    )
    assert gradient.isfinite().all()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_losses_of_logits_that_are_no_numbers(bad, place):
    logits = torch.tensor([[1.0, 2.0, 0.5, 0.1, -1.0], [3.0, 1.0, 2.0, 0.0, 5.0]], device=DEVICE)
    logits[0, place] = bad
    y, target = torch.tensor([0, 1], device=DEVICE), torch.tensor([1, 2], device=DEVICE)
    for function, arguments in (
        *((losses.attack_loss, (kind, logits, y, target)) for kind in ("ce", "dlr", "t")),
        (losses.target_margin, (logits, y, target)),
        (losses.margin, (logits, y)),
        (losses.correct, (logits, y)),
    ):
        found, expected = run_kernel(function, *arguments), function(*arguments)
        torch.testing.assert_close(found, expected, equal_nan=True, msg=f"{function.__name__}{arguments[:1]}")


def test_second_derivatives_are_refused():
    logits, y = torch.randn(3, 4, device=DEVICE, requires_grad=True), torch.zeros(3, dtype=torch.long, device=DEVICE)
    loss = run_kernel(losses.attack_loss, "dlr", logits, y, y).sum()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, logits, create_graph=True)


def test_attack_kernels_decline_unsupported_arguments():
    x, ball = torch.rand(2, 3, 4, 4, device=DEVICE), atas.L2(1.0)
    slots, doubles = Slots.empty(2, x), Slots.empty(2, x.double())
    slanted = dataclasses.replace(slots, point=slots.point.to(memory_format=torch.channels_last))
    numbers, flags, now = x[:, 0, 0, 0].clone(), slots.done, torch.tensor(0, device=DEVICE)
    climb = APGD(loss="ce", iterations=5).init_state(slots, BALL, 4, 0)._buffers
    table, y, z = torch.zeros(6, dtype=torch.long, device=DEVICE), slots.y, x[:, 0, 0]
    for function, *arguments in [
        (search.random_start, ball, slots, 0, now, x),
        (search.random_start, BALL, doubles, 0, now, x.double()),
        (search.random_start, BALL, slanted, 0, now, slanted.point),
        (projected_gradient_descent.pgd_update, ball, slots, x, x, 0.1, 5),
        (projected_gradient_descent.pgd_update, BALL, doubles, x.double(), x.double(), 0.1, 5),
        (projected_gradient_descent.pgd_update, BALL, slanted, x, x, 0.1, 5),
        (apgd.apgd_update, ball, slots, climb, table, 1, x, numbers, x, flags),
        (apgd.apgd_update, BALL, slots, climb, table, 1, x, numbers.double(), x, flags),
        (square.linf_proposal, EPS, 0, doubles, table),
        (square.square_update, 5, slots, numbers.double(), x, numbers, flags),
        (fab.fab_update, FAB(), ball, slots, x, numbers, x, flags),
        (fab.boundary_step, ball, x, x, x, numbers, 1.05, 0.1),
        (losses.attack_loss, "ce", z.double(), y, y),
        (losses.attack_loss, "ce", z, y.int(), y.int()),
        (losses.margin, torch.zeros(2, 5000, device=DEVICE), y),
        (losses.correct, z.double(), y),
    ]:
        assert KERNELS[function](*arguments) is NotImplemented, function.__name__


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


APGD_KERNELS = [search.random_start, losses.attack_loss, apgd.apgd_update, losses.correct]
SEARCHES = {
    "apgd-ce": (APGD(loss="ce", iterations=9), APGD_KERNELS),
    "apgd-dlr": (
        APGD(loss="dlr", iterations=6, eot_iterations=2),
        APGD_KERNELS,
    ),
    "apgd-t": (APGD(loss="t", iterations=9), APGD_KERNELS),
    "pgd": (
        projected_gradient_descent.PGDRestart(6, restart=1),
        [search.random_start, projected_gradient_descent.pgd_update],
    ),
    "square": (Square(queries=16), [square.linf_proposal, losses.margin, square.square_update, losses.correct]),
    "fab-t": (FAB(iterations=5), [losses.target_margin, fab.boundary_step, fab.fab_update, losses.correct]),
}


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("eps", [0.02, 0.06])
def test_whole_searches(problem, name, eps):
    """Few slots and polls at odd times, so that slots are at different times, some of them idle."""
    (model, x, y), (search, functions) = problem, SEARCHES[name]
    ball = atas.Linf(eps)

    def attacked():
        scheduler = Scheduler(model, model, x.device, slots=6, poll_interval=3)
        examples = scheduler.examples(x, y, torch.arange(len(x)))
        progress = SearchProgress.start(search, examples, examples.misclassified(), points=x.clone())
        scheduler.run(search, examples, ball, progress, seed=3)
        return progress

    expected = attacked()
    with count_kernel_calls() as calls, use_fast_ops():
        found = attacked()
    assert all(calls[function] for function in functions)
    assert torch.equal(found.broken, expected.broken)
    assert torch.equal(found.finished, expected.finished)
    assert torch.equal(found.queries_per_example, expected.queries_per_example)
    torch.testing.assert_close(found.points, expected.points, rtol=0, atol=2e-5 if name == "fab-t" else 1e-6)
    assert not found.broken.all() or eps > 0.03
    assert (found.broken & (found.queries_per_example > 0)).any() or eps < 0.03
