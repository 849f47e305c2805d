"""FAB: its projection against solvers, its course against a slow reference, its findings against the authors' code."""

import numpy as np
import pytest
import torch
from helpers import trained_digits
from helpers.attack_states import course, filled
from helpers.references import pgd as reference
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import optimize

from atas import threat
from atas.attacks.fab import FAB, boundary_step, to_boundary
from atas.core.dispatch import use_fast_ops
from atas.errors import UsageError
from atas.threat import L2, Linf


@pytest.fixture(params=[("linf", 0.1), ("l2", 0.4)], ids=["linf", "l2"])
def small_ball(request):
    """So small that some examples last to the end."""
    return threat.create(*request.param)


@pytest.fixture(params=[False, True], ids=["linf", "l2"])
def euclidean(request):
    return request.param


def boundary(point, normal, value, euclidean):
    """The smallest change once more: by bisection, in float64, one point at a time."""
    normal = normal * (1 if value >= 0 else -1)
    slope = np.abs(normal)
    room = np.where(normal > 0, point, 1 - point) * (slope > 0)
    pace = slope if euclidean else np.ones_like(slope)

    def loss(t):
        return (slope * np.minimum(t * pace, room)).sum()

    if (slope * room).sum() <= abs(value):
        return -np.sign(normal) * room
    low, high = 0.0, 1.0
    while loss(high) < abs(value):
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if loss(middle) < abs(value) else (low, middle)
    return -np.sign(normal) * np.minimum(high * pace, room)


def fab(net, x, y, target, ball, search):
    """The authors' algorithm, one image at a time: all points evaluated, and the closest adversarial one's distance."""
    point, points, closest = x, [], np.inf
    wanted = np.eye(len(net.b2))[target] - np.eye(len(net.b2))[y]
    norm = (lambda d: np.sqrt((d**2).sum())) if ball.name == "l2" else (lambda d: np.abs(d).max())
    for _ in range(search.iterations):
        lead, normal = wanted @ net.logits(point), net.pull_back(point, wanted)
        change, change_x = (
            boundary(t.ravel(), normal.ravel(), lead + (normal * (t - point)).sum(), ball.name == "l2").reshape(x.shape)
            for t in (point, x)
        )
        length, length_x = max(norm(change), 1e-8), max(norm(change_x), 1e-8)
        alpha = min(length / (length + length_x), search.alpha_max)
        ahead = (1 - alpha) * (point + search.eta * change) + alpha * (x + search.eta * change_x)
        ahead = np.clip(ahead, 0, 1)
        points += [point, ahead]
        point = ahead
        if net.logits(ahead).argmax() != y:
            closest = min(closest, norm(ahead - x))
            point = x + search.beta * (ahead - x)
    return np.stack(points), closest


coordinates = st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0, 0.5]))
slopes = st.one_of(st.floats(-3, 3).map(lambda slope: round(slope, 4)), st.sampled_from([0.0, 1.0, -1.0, 1e-3, -1e3]))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(coordinates, slopes), min_size=1, max_size=20), st.floats(-8, 8), st.booleans())
def test_the_change_is_the_smallest_that_reaches_the_boundary(pairs, value, euclidean):
    point, normal = np.array(pairs).T
    found = to_boundary(
        *(torch.tensor(part, dtype=torch.float64)[None] for part in (point, normal, value)), euclidean=euclidean
    )[0].numpy()
    np.testing.assert_allclose(found, boundary(point, normal, value, euclidean), rtol=0, atol=1e-7)
    assert (point + found >= 0).all()
    assert (point + found <= 1).all()
    assert (found[normal == 0] == 0).all()


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(coordinates, st.floats(-3, 3)), min_size=2, max_size=7), st.floats(-4, 4))
def test_general_solvers_find_no_smaller_change(pairs, value):
    point, normal = np.array(pairs).T
    reach = np.where(normal * value > 0, point, 1 - point) @ np.abs(normal)
    assume(abs(value) < 0.99 * reach)
    assume(reach > 1e-2)
    parts = [torch.tensor(part, dtype=torch.float64)[None] for part in (point, normal, value)]
    for euclidean in (False, True):
        change = to_boundary(*parts, euclidean=euclidean)[0].numpy()
        assert value + normal @ change == pytest.approx(0, abs=1e-9)
        limits = list(zip(-point, 1 - point, strict=True))
        if euclidean:
            solved = optimize.minimize(
                lambda d: d @ d,
                np.zeros_like(point),
                jac=lambda d: 2 * d,
                bounds=limits,
                constraints={"type": "eq", "fun": lambda d: value + normal @ d, "jac": lambda d: normal},
                options={"ftol": 1e-14, "maxiter": 500},
            )
            if solved.success:
                assert change @ change == pytest.approx(solved.fun, rel=1e-4, abs=1e-7)
        else:
            eye, ones = np.eye(len(point)), -np.ones((len(point), 1))
            solved = optimize.linprog(
                np.append(np.zeros_like(point), 1),
                A_ub=np.block([[eye, ones], [-eye, ones]]),
                b_ub=np.zeros(2 * len(point)),
                A_eq=np.append(normal, 0)[None],
                b_eq=[-value],
                bounds=[*limits, (0, None)],
            )
            assert np.abs(change).max() == pytest.approx(solved.fun, rel=1e-6, abs=1e-7)


def test_the_change_of_a_large_image_in_float32(euclidean, generator):
    """Rows from far inside to beyond what the box allows, gradients over many orders of magnitude."""
    rows, pixels = 40, 3072
    point = (torch.rand(rows, pixels, generator=generator) * 1.2 - 0.1).clamp(0, 1)
    normal = torch.randn(rows, pixels, generator=generator) * torch.logspace(-12, 6, rows)[:, None]
    normal *= torch.rand(rows, pixels, generator=generator) ** 4
    reach = (torch.where(normal > 0, point, 1 - point) * normal.abs()).sum(1)
    value = reach * torch.linspace(0.001, 1.2, rows)[torch.randperm(rows, generator=generator)]
    found = to_boundary(point, normal, value, euclidean=euclidean)
    for i in range(rows):
        expected = boundary(*(part[i].double().numpy() for part in (point, normal, value)), euclidean)
        np.testing.assert_allclose(found[i].numpy(), expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_a_row_does_not_depend_on_the_others_and_zero_gradients_stay(euclidean, generator):
    point, normal = torch.rand(5, 30, generator=generator), torch.randn(5, 30, generator=generator)
    value = torch.tensor([1.0, -0.3, 0.0, 50.0, 2.0])
    normal[4] = 0
    together = to_boundary(point, normal, value, euclidean=euclidean)
    for i in range(5):
        rows = slice(i, i + 1)
        assert torch.equal(to_boundary(point[rows], normal[rows], value[rows], euclidean=euclidean)[0], together[i])
    assert (together[[2, 4]] == 0).all()
    assert together[:2].abs().amax(1).min() > 0


@pytest.mark.slow
@pytest.mark.parametrize("classes", [2, 3, 6])
def test_the_course_is_that_of_the_reference(make_images, small_ball, classes):
    ball, search = small_ball, FAB(iterations=40)
    net = reference.Perceptron(2 * 4 * 3, hidden=11, classes=classes)
    for weights in net.module.parameters():
        weights.data.mul_(2)
    x = make_images(10, (2, 4, 3), dtype=torch.float64)
    y = net.module(x).argmax(1)
    target = (y + 1) % classes
    slots = filled(x, y, target)
    found, broken = course(search, slots, net.module, ball)
    distances = []
    for i in range(len(x)):
        points, closest = fab(net, x[i].numpy(), int(y[i]), int(target[i]), ball, search)
        np.testing.assert_allclose(found[:, i].numpy(), points, rtol=0, atol=1e-7)
        assert bool(broken[i]) == (closest <= ball.eps)
        if not broken[i] and closest < np.inf:
            assert ball.distance(slots.point, x)[i].item() == pytest.approx(closest)
        distances.append(closest)
    assert min(distances) <= ball.eps < max(distances), "the case must hold both broken examples and others"


def test_an_iteration_is_two_evaluations_and_every_job_makes_all_of_them(make_images, small_ball):
    model = reference.Perceptron(2 * 4 * 3).module
    x = make_images(4, (2, 4, 3), dtype=torch.float64)
    slots, search = filled(x, model(x).argmax(1), model(x).argmin(1)), FAB(iterations=7)
    seen, _ = course(search, slots, model, small_ball)
    assert len(seen) == search.steps * search.queries_per_step == 14
    assert slots.iteration.tolist() == [7] * 4
    assert slots.done.all()
    torch.testing.assert_close(seen[0], x, rtol=0, atol=0)


def test_broken_says_that_the_point_is_misclassified_and_inside_and_stops_the_slot(make_images, small_ball):
    model, ball = reference.Perceptron(2 * 4 * 3, hidden=11, classes=4).module, small_ball
    x = make_images(30, (2, 4, 3), dtype=torch.float64)
    y = model(x).argmax(1)
    slots = filled(x, y, (y + 1) % 4)
    state = FAB(iterations=20).init_state(slots, ball, 4, 0)
    iteration, point = slots.iteration.clone(), slots.point.clone()
    for _ in range(22):
        held = slots.broken | slots.done
        state.step(model)
        assert torch.equal(slots.iteration[held], iteration[held])
        assert torch.equal(slots.point[held], point[held])
        assert (slots.iteration[~held] == iteration[~held] + 1).all()
        iteration, point = slots.iteration.clone(), slots.point.clone()
        found = model(slots.point).argmax(1) != y
        distance = ball.distance(slots.point, x)
        assert torch.equal(slots.broken, found & (distance <= ball.eps))
        torch.testing.assert_close(state.closest[found], distance[found])
        assert torch.equal(state.closest.isinf(), ~found)
        assert torch.equal(slots.point[~found], x[~found])
    assert 0 < slots.broken.sum() < 30
    assert (slots.broken | slots.done).all()


def test_after_a_point_that_is_not_confirmed_a_farther_one_inside_the_ball_is_offered_too(make_images):
    """The search goes on as if it had only stepped back."""
    model, ball = reference.Perceptron(2 * 4 * 3, hidden=11, classes=4).module, Linf(1)
    x = make_images(12, (2, 4, 3), dtype=torch.float64)
    y = model(x).argmax(1)
    slots = filled(x, y, (y + 1) % 4)
    state, offered = FAB(iterations=15).init_state(slots, ball, 4, 0), []
    for _ in range(15):
        state.step(model)
        offered.append(torch.where(slots.broken, ball.distance(slots.point, x), torch.inf))
        slots.broken.fill_(False)
    offered = torch.stack(offered)
    assert ((offered[1:] > offered[:-1]) & offered[1:].isfinite()).any()
    torch.testing.assert_close(state.closest, offered.amin(0))


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_the_closest_points_are_those_of_the_authors_code(norm):
    """No ball stops the search, so each distance is the least of all iterations."""
    code = pytest.importorskip("pyautoattack.fab_pt", reason="pyautoattack is not installed")
    model, x, y = trained_digits.trained()
    ball = threat.create(norm, 1e-6)
    theirs = code.FABAttack_PT(model, norm=trained_digits.NORMS[norm], n_iter=25, eps=ball.eps, targeted=True)
    for rank in (1, 5):
        slots = filled(x, y, model(x).argsort(1, descending=True)[:, rank])
        course(FAB(iterations=25), slots, model, ball)
        theirs.target_class = rank + 1
        expected = ball.distance(theirs.attack_single_run(x, y, is_targeted=True), x)
        assert expected.min() > 100 * ball.eps
        torch.testing.assert_close(ball.distance(slots.point, x), expected, rtol=1e-3, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("ball", [Linf(0.1), L2(0.55)])
def test_robust_accuracy_is_that_of_the_authors_code(ball):
    code = pytest.importorskip("pyautoattack.fab_pt", reason="pyautoattack is not installed")
    model, x, y = trained_digits.trained()
    theirs = code.FABAttack_PT(model, norm=trained_digits.NORMS[ball.name], n_iter=20, eps=ball.eps, targeted=True)
    expected = model(theirs.perturb(x, y)).argmax(1) == y
    found = trained_digits.robust(FAB(iterations=20), model, x, y, ball)
    assert 0.25 < expected.float().mean() < 0.75
    assert (found & ~expected).sum() == 0
    assert (found != expected).sum() <= 3, "the last point, brought into the ball, may break a few more"


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_a_gradient_or_a_logit_that_is_no_number_does_no_harm(norm):
    def model(x):
        total = x[:, 0].flatten(1).sum(1)
        return torch.stack([(total * 0).sqrt(), total * torch.inf, total * 0 + 1], 1)

    x, y = torch.rand(3, 1, 2, 2), torch.tensor([2, 2, 0])
    seen, _ = course(
        FAB(iterations=10), filled(x, y, torch.tensor([0, 1, 1])), model, threat.create(norm, 0.1), classes=3
    )
    assert seen.isfinite().all()
    assert seen.min() >= 0
    assert seen.max() <= 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it itself
def test_the_step_can_be_compiled_whole(small_net, make_images, small_ball):
    """On a GPU its small operations are fused; here it is only traced."""
    model = small_net().eval().double()
    x = make_images(4, dtype=torch.float64)
    y = model(x).argmax(1)
    expected, _ = course(FAB(iterations=8), filled(x, y, (y + 1) % 4), model, small_ball)
    with use_fast_ops("aot_eager"):
        found, _ = course(FAB(iterations=8), filled(x, y, (y + 1) % 4), model, small_ball)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


def test_name_targets_and_settings():
    assert FAB().name == "fab-t"
    assert [FAB().num_targets(classes) for classes in (2, 5, 10, 100)] == [1, 4, 9, 9]
    assert FAB().settings(L2(0.5)) == {
        "iterations": 100,
        "eta": 1.05,
        "beta": 0.9,
        "alpha_max": 0.1,
        "restarts": 1,
        "start": "image",
    }


def test_wrong_settings_are_refused():
    with pytest.raises(UsageError, match="iterations must be at least 1; got 0"):
        FAB(iterations=0)


@pytest.mark.parametrize("ball", [Linf(8 / 255), L2(0.5), Linf(0.0)], ids=str)
@pytest.mark.parametrize("margin", [0.0, 1e-38, -1e4, 1e4, 3e38, float("inf"), float("nan")])
@pytest.mark.parametrize("slope", [0.0, 1e-45, 1e-38, 1.0, 1e19, 3e38, float("inf"), float("nan")])
def test_a_step_is_an_image_whatever_the_model_says(ball, margin, slope):
    """The next point is finite and in [0, 1] for every margin and gradient that float32 holds."""
    x = torch.linspace(0, 1, 2 * 3 * 4 * 4).view(2, 3, 4, 4)
    point = (x + 0.01).clamp(0, 1)
    gradient = torch.randn(x.shape).sign() * slope
    ahead = boundary_step(ball, point, x, gradient, torch.tensor([margin, -margin]), 1.05, 0.1)
    assert ahead.isfinite().all()
    assert ahead.min() >= 0
    assert ahead.max() <= 1
