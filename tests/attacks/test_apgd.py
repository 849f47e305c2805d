"""APGD against a slow reference and against the authors' code; its losses, its bookkeeping, its mean over passes."""

import numpy as np
import pytest
import torch
from helpers.attack_states import course, filled
from helpers.references import apgd as apgd_reference
from helpers.references import pgd as reference
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from atas import threat
from atas.attacks.apgd import APGD, checkpoints
from atas.attacks.losses import cross_entropy, dlr, targeted_dlr
from atas.core.dispatch import use_fast_ops
from atas.core.rng import CounterRNG
from atas.errors import UsageError
from atas.threat import Linf

LOSSES = {"ce": cross_entropy, "dlr": dlr, "t": targeted_dlr}


@pytest.fixture(params=[("linf", 0.05), ("l2", 0.2)], ids=["linf", "l2"])
def small_ball(request):
    """So small that some examples last to the end."""
    return threat.create(*request.param)


def curved(classes):
    """A network curved enough for steps of 2 eps to be too large."""
    return reference.Perceptron(2 * 4 * 3, hidden=11, classes=classes, gain=2)


def starts(ball, x):
    return ball.random_start(x, CounterRNG(0, torch.tensor(0), torch.arange(len(x))))


@pytest.mark.parametrize("classes", [2, 3, 4, 6])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.slow
def test_the_course_is_that_of_the_reference(make_images, small_ball, loss, classes):
    ball, net = small_ball, curved(classes)
    x = make_images(8, (2, 4, 3), dtype=torch.float64)
    y = net.module(x).argmax(1)
    target = (y + 1) % classes
    found, _ = course(APGD(loss=loss), filled(x, y, target), net.module, ball)
    lengths, reasons = [], set()
    for i, start in enumerate(starts(ball, x)):
        label = int(y[i])
        points, why = apgd_reference.apgd(
            net, x[i].numpy(), label, int(target[i]), start.numpy(), ball.name, ball.eps, 100, loss
        )
        if loss != "ce":  # beyond a misclassified point the gradient of DLR may be zero but for rounding
            points = points[: next((k + 1 for k, p in enumerate(points) if net.logits(p).argmax() != label), 101)]
        lengths.append(len(points))
        reasons.update(why)
        np.testing.assert_allclose(found[: len(points), i].numpy(), points, rtol=0, atol=1e-6)
    assert max(lengths) == 101, "the case must hold an example that lasts to the end"
    assert reasons >= ({"few rises", "same best"} if (ball.name, loss) == ("l2", "ce") else {"few rises"})


@pytest.mark.parametrize("loss", ["ce", "t"])
@pytest.mark.slow
def test_the_course_is_that_of_the_authors_code(make_images, small_ball, loss):
    """From our starts: the greatest loss of whatever was not broken, and what was."""
    code = pytest.importorskip("pyautoattack.autopgd_base", reason="pyautoattack is not installed")
    ball, model = small_ball, curved(classes=6).module
    x = make_images(40, (2, 4, 3), dtype=torch.float64)
    y = model(x).argmax(1)
    target = (y + 1) % 6
    slots = filled(x, y, target)
    _, broken = course(APGD(loss=loss), slots, model, ball)

    kind = code.APGDAttack if loss == "ce" else code.APGDAttack_targeted
    attack = kind(model, norm={"linf": "Linf", "l2": "L2"}[ball.name], eps=ball.eps, seed=0)
    attack.y_target = target
    attack.init_hyperparam(x)
    try:
        torch.set_default_dtype(torch.float64)  # or it would compare losses in float32
        _, right, greatest, _ = attack.attack_single_run(x, y, x_init=starts(ball, x))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(broken, ~right)
    assert 5 < right.sum() < 36
    ours = LOSSES[loss](model(slots.point), y, target)
    torch.testing.assert_close(ours[right], greatest[right], rtol=0, atol=1e-9)


@pytest.mark.parametrize("iterations", [1, 2, 7, 16, 20, 50, 99, 100, 1000])
def test_windows_end_at_the_checkpoints_of_the_paper(iterations):
    ends = [made for made, length in enumerate(checkpoints(iterations)) if length]
    assert ends == sorted({w for w in apgd_reference.checkpoints(iterations) if 0 < w <= iterations})
    assert sum(checkpoints(iterations)) == ends[-1]


@pytest.mark.parametrize("classes", [2, 3, 4, 5, 10])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_their_slopes(classes, loss, generator):
    logits = torch.randn(60, classes, generator=generator, dtype=torch.float64).mul(3).requires_grad_()
    y = torch.randint(classes, (60,), generator=generator)
    target = (y + 1 + torch.randint(classes - 1, (60,), generator=generator)) % classes
    values = LOSSES[loss](logits, y, target)
    values.sum().backward()
    for z, label, wanted, value, slope in zip(logits.detach(), y, target, values, logits.grad, strict=True):
        expected, expected_slope = apgd_reference.LOSSES[loss](z.numpy(), int(label), int(wanted))
        assert value.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
        np.testing.assert_allclose(slope.numpy(), expected_slope, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("classes", [2, 3, 4, 5])
def test_the_targeted_loss_has_a_slope_towards_every_target(classes):
    """Otherwise a target that comes last could never be reached."""
    logits = torch.arange(classes, 0, -1.0).repeat(classes - 1, 1).requires_grad_()
    target = torch.arange(1, classes)
    targeted_dlr(logits, torch.zeros_like(target), target).sum().backward()
    assert (logits.grad[torch.arange(classes - 1), target] > 0.05).all()


@pytest.mark.parametrize("loss", ["dlr", "t"])
def test_dlr_keeps_its_value_and_is_not_nan_where_all_logits_are_equal(loss):
    y, target = torch.tensor([0, 2]), torch.tensor([1, 1])
    logits = torch.tensor([[3.0, 1.0, 0.5, -1.0], [0.0, 0.0, 0.0, 0.0]])
    value = LOSSES[loss](logits, y, target)
    assert value.isfinite().all()
    torch.testing.assert_close(LOSSES[loss](1000 * logits - 7, y, target), value)


def test_a_start_and_as_many_steps_are_evaluated(make_images, labels, small_net, ball):
    x, y = make_images(3), labels(3)
    search = APGD(loss="ce", iterations=7)
    slots = filled(x, y)
    seen, _ = course(search, slots, small_net().eval(), ball)
    assert len(seen) == search.steps * search.queries_per_step == 8
    assert slots.iteration.tolist() == [8, 8, 8]
    assert slots.done.all()
    assert torch.equal(seen[0], starts(ball, x))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.sampled_from(["linf", "l2"]), st.floats(0, 1), st.sampled_from(list(LOSSES)), st.integers(0, 2**40))
def test_points_stay_in_the_ball_and_are_images(small_net, make_images, norm, eps, loss, seed):
    ball = threat.create(norm, eps)
    x, y = make_images(3, (1, 4, 5), seed=seed % 1000), torch.tensor([0, 3, 1])
    seen, _ = course(
        APGD(loss=loss, iterations=12), filled(x, y, (y + 1) % 4), small_net(channels=1).eval(), ball, seed=seed
    )
    assert seen.min() >= 0
    assert seen.max() <= 1
    assert max(ball.distance(point, x).max() for point in seen) <= eps * (1 + 1e-5) + 1e-6


@pytest.mark.parametrize("loss", LOSSES)
def test_broken_says_that_the_point_is_misclassified_and_stops_the_slot(make_images, small_ball, loss):
    model, ball = curved(classes=4).module, small_ball
    x = make_images(12, (2, 4, 3), dtype=torch.float64)
    y = model(x).argmax(1)
    slots = filled(x, y, (y + 1) % 4)
    state = APGD(loss=loss, iterations=20).init_state(slots, ball, 4, 0)
    iteration, point = slots.iteration.clone(), slots.point.clone()
    for _ in range(25):
        held = slots.broken | slots.done
        state.step(model)
        assert torch.equal(slots.iteration[held], iteration[held])
        assert torch.equal(slots.point[held], point[held])
        assert (slots.iteration[~held] == iteration[~held] + 1).all()
        iteration, point = slots.iteration.clone(), slots.point.clone()
        assert torch.equal(model(slots.point).argmax(1) != y, slots.broken)
    assert 0 < slots.broken.sum() < 12
    assert torch.equal(slots.done | slots.broken, torch.ones(12, dtype=torch.bool))


def test_the_last_point_has_the_greatest_loss(small_net, make_images, ball):
    model = small_net().eval()
    x = make_images(6)
    y = model(x).argmax(1)
    slots = filled(x, y)
    seen, broken = course(APGD(loss="ce", iterations=20), slots, model, ball)
    losses = torch.stack([cross_entropy(model(point), y, y) for point in seen])
    right = ~broken
    torch.testing.assert_close(cross_entropy(model(slots.point), y, y)[right], losses.amax(0)[right])


def test_passes_are_averaged(generator):
    """With two classes DLR is a difference of logits, so noise that cancels in the mean leaves no trace."""
    weights = torch.randn(2, 2, 12, generator=generator, dtype=torch.float64)
    x, y = torch.rand(5, 3, 2, 2, generator=generator, dtype=torch.float64), torch.tensor([0, 1, 0, 1, 0])
    calls = [0]

    def steady(point):
        return point.flatten(1) @ weights[0].T

    def noisy(point):
        calls[0] += 1
        return steady(point) + (-1) ** calls[0] * 5 * (point.flatten(1) @ weights[1].T)

    expected, expected_broken = course(APGD(loss="dlr", iterations=10), filled(x, y), steady, Linf(0.1), classes=2)
    search = APGD(loss="dlr", iterations=10, eot_iterations=2)
    found, broken = course(search, filled(x, y), noisy, Linf(0.1), classes=2)
    assert calls == [search.steps * search.queries_per_step] == [22]
    torch.testing.assert_close(found[::2], expected, rtol=0, atol=1e-9)
    assert torch.equal(found[::2], found[1::2])
    assert torch.equal(broken, expected_broken)


def test_a_gradient_or_a_loss_that_is_no_number_does_no_harm(ball):
    class Root(nn.Module):
        def forward(self, x):
            total = x[:, 0].flatten(1).mul(0).sum(1)
            return torch.stack([total.sqrt(), total + 1], 1)

    x, y = torch.rand(3, 1, 2, 2), torch.tensor([1, 1, 1])
    seen, _ = course(APGD(loss="ce", iterations=10), filled(x, y), Root(), ball, classes=2)
    assert seen.isfinite().all()


def test_any_loss_is_greater_than_one_that_is_no_number(small_net, make_images, ball):
    """As of a start where a half-precision search overflows."""
    net, x, calls = small_net().eval(), make_images(6), []
    y = net(x).argmax(1)

    def model(point):
        calls.append(point)
        return net(point) * (torch.nan if len(calls) == 1 else 1)

    slots = filled(x, y)
    seen, _ = course(APGD(loss="ce", iterations=20), slots, model, ball)
    losses = torch.stack([cross_entropy(net(point), y, y) for point in seen[1:]])
    right = torch.stack([net(point).argmax(1) == y for point in seen[1:]]).all(0)
    assert right.any()
    torch.testing.assert_close(cross_entropy(net(slots.point), y, y)[right], losses.amax(0)[right])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it itself
def test_the_step_can_be_compiled_whole(small_net, make_images, small_ball):
    """On a GPU its small operations are fused; here it is only traced."""
    model = small_net().eval().double()
    x = make_images(4, dtype=torch.float64)
    y = model(x).argmax(1)
    expected, _ = course(APGD(loss="t", iterations=8), filled(x, y, (y + 1) % 4), model, small_ball)
    with use_fast_ops("aot_eager"):
        found, _ = course(APGD(loss="t", iterations=8), filled(x, y, (y + 1) % 4), model, small_ball)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"loss": "hinge"}, "the loss of APGD must be one of ce, dlr, t; got 'hinge'"),
        ({"iterations": 0}, "iterations must be at least 1; got 0"),
        ({"eot_iterations": 0}, "eot_iterations must be at least 1; got 0"),
    ],
)
def test_wrong_settings_are_refused(wrong, message):
    with pytest.raises(UsageError, match=message):
        APGD(**wrong)


def test_names_targets_and_settings():
    assert [APGD(loss=loss).name for loss in LOSSES] == ["apgd-ce", "apgd-dlr", "apgd-t"]
    assert [
        APGD(loss="ce").num_targets(10),
        APGD(loss="t").num_targets(10),
        APGD(loss="t").num_targets(100),
        APGD(loss="t").num_targets(2),
    ] == [0, 9, 9, 1]
    assert APGD(loss="t").settings(Linf(0.1)) == {"loss": "targeted_dlr", "iterations": 100, "passes": 1}
