"""The threat models: inside the ball always, uniform starts, steepest steps."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atas.core.rng import CounterRNG
from atas.errors import UsageError
from atas.threat import L2, Linf, create, format_pixels, l2_norm, per_example

SHAPE = (2, 3, 4)
BOTH = [Linf(8 / 255), L2(0.5)]
both_norms = pytest.mark.parametrize("threat", BOTH, ids=["linf", "l2"])


def draws(count, seed=0, epoch=0):
    return CounterRNG(seed, torch.tensor(epoch), torch.arange(count))


def kolmogorov(sample):
    """The distance of a sample's distribution from uniform on [0, 1], in units of what chance allows."""
    sample = sample.flatten().double().sort().values
    places = torch.arange(1, len(sample) + 1, dtype=torch.float64) / len(sample)
    return float((sample - places).abs().max()) * math.sqrt(len(sample))


# Making one


@pytest.mark.parametrize("kind", [Linf, L2])
@pytest.mark.parametrize("eps", [-1e-9, -1.0, float("nan"), float("inf"), float("-inf")])
def test_a_budget_is_a_number_that_is_not_negative(kind, eps):
    with pytest.raises(UsageError, match="eps must be a number that is not negative"):
        kind(eps)


@pytest.mark.parametrize(("eps", "words"), [(8, "write 8/255 rather than 8"), (1.5, "1.5/255"), (255, "255/255")])
def test_a_linf_budget_in_grey_levels_is_told_how_to_be_written(eps, words):
    with pytest.raises(UsageError, match=words):
        Linf(eps)


def test_an_l2_budget_that_reaches_every_image_is_refused():
    L2(8).check_budget((1, 8, 8))
    Linf(1).check_budget((1, 8, 8))
    with pytest.raises(UsageError, match=r"\(3, 32, 32\) into any other.*write 128/255"):
        L2(128).check_budget((3, 32, 32))


def test_budgets_at_the_ends():
    assert Linf(0).eps == 0
    assert Linf(1).eps == 1
    assert L2(8).eps == 8


@pytest.mark.parametrize(
    ("threat", "text"),
    [
        (Linf(8 / 255), "Linf(8/255)"),
        (Linf(0.031), "Linf(0.031)"),
        (Linf(0.2), "Linf(0.2)"),
        (Linf(0.0), "Linf(0/255)"),
        (L2(0.5), "L2(0.5)"),
        (L2(128 / 255), "L2(0.501961)"),
    ],
)
def test_repr(threat, text):
    assert repr(threat) == text


def test_a_threat_is_a_frozen_value():
    assert Linf(8 / 255) == Linf(8 / 255)
    assert Linf(0.1) != L2(0.1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Linf(8 / 255).eps = 1.0


def test_create_by_name():
    assert create("linf", 0.1) == Linf(0.1)
    assert create("l2", 0.1) == L2(0.1)
    with pytest.raises(UsageError, match="unknown norm 'linff'; did you mean 'linf'"):
        create("linff", 0.1)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (8 / 255, "8/255"),
        (1 / 255, "1/255"),
        (0.03, "0.03"),
        (0.5, "0.5"),
        (0.0, "0/255"),
        (1e-9, "1e-09"),
        (0.2, "0.2"),
        (1.0, "1"),
    ],
)
def test_sizes_are_printed_in_grey_levels(value, text):
    assert format_pixels(value) == text


# Projection


@both_norms
def test_projection_inside_is_the_point_itself(threat, make_images):
    x = make_images(5, SHAPE, dtype=torch.float64) * 0.5 + 0.25
    point = x + 0.9 * threat.sample(draws(5), SHAPE).double()
    torch.testing.assert_close(threat.project(point, x), point, atol=1e-15, rtol=0)


def test_linf_clips_every_pixel():
    x = torch.tensor([[0.5, 0.5, 0.01, 0.99]]).view(1, 1, 2, 2)
    point = torch.tensor([[0.9, 0.45, -0.5, 2.0]]).view(1, 1, 2, 2)
    expected = torch.tensor([[0.6, 0.45, 0.0, 1.0]]).view(1, 1, 2, 2)
    torch.testing.assert_close(Linf(0.1).project(point, x), expected)


def test_l2_shrinks_each_example_by_its_own_length():
    x = torch.full((3, 1, 1, 2), 0.5)
    point = x + torch.tensor([[0.3, 0.4], [0.06, 0.08], [0.0, 0.0]]).view(3, 1, 1, 2)
    expected = x + torch.tensor([[0.12, 0.16], [0.06, 0.08], [0.0, 0.0]]).view(3, 1, 1, 2)
    torch.testing.assert_close(L2(0.2).project(point, x), expected)
    edge = torch.tensor([0.95, 0.5]).view(1, 1, 1, 2)
    torch.testing.assert_close(
        L2(0.2).project(edge + torch.tensor([0.3, 0.4]).view(1, 1, 1, 2), edge),
        torch.tensor([1.0, 0.66]).view(1, 1, 1, 2),
    )


@both_norms
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    eps=st.floats(0, 1),
    far=st.sampled_from([0.0, 1e-6, 0.1, 3.0, 1e6]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**40),
)
def test_projections_and_starts_are_inside_always(threat, eps, far, dtype, seed):
    threat = type(threat)(eps)
    generator = torch.Generator().manual_seed(seed)
    x = (torch.rand(4, *SHAPE, generator=generator, dtype=dtype) * 1.5 - 0.25).clamp(0, 1)
    point = x + far * torch.randn(4, *SHAPE, generator=generator, dtype=dtype)
    for inside in (threat.project(point, x), threat.random_start(x, draws(4, seed))):
        assert inside.dtype == dtype
        assert inside.min() >= 0
        assert inside.max() <= 1
        assert threat.distance(inside.double(), x.double()).max() <= eps + 1e-6
    again = threat.project(threat.project(point, x), x)
    torch.testing.assert_close(again, threat.project(point, x), atol=1e-6, rtol=0)


@both_norms
def test_a_budget_of_zero_leaves_the_image(threat, make_images):
    nothing, x = type(threat)(0.0), make_images(3, SHAPE)
    assert torch.equal(nothing.random_start(x, draws(3)), x)
    assert torch.equal(nothing.project(x + torch.randn_like(x), x), x)


def test_distance_is_the_norm_of_the_difference():
    x = torch.zeros(2, 1, 1, 2)
    point = torch.tensor([[0.3, -0.4], [0.0, 0.0]]).view(2, 1, 1, 2)
    torch.testing.assert_close(Linf(0.1).distance(point, x), torch.tensor([0.4, 0.0]))
    torch.testing.assert_close(L2(0.1).distance(point, x), torch.tensor([0.5, 0.0]))


# Steps


def test_linf_steps_along_the_sign():
    point = torch.full((1, 1, 1, 3), 0.5)
    gradient = torch.tensor([1e-30, -7.0, 0.0]).view(1, 1, 1, 3)
    torch.testing.assert_close(Linf(0.1).step(point, gradient, 0.25), torch.tensor([0.75, 0.25, 0.5]).view(1, 1, 1, 3))


def test_l2_steps_along_the_unit_gradient():
    point = torch.zeros(1, 1, 1, 2)
    gradient = torch.tensor([30.0, -40.0]).view(1, 1, 1, 2)
    torch.testing.assert_close(L2(0.1).step(point, gradient, 0.5), torch.tensor([0.3, -0.4]).view(1, 1, 1, 2))


@both_norms
def test_a_step_climbs_more_than_any_other_of_its_length(threat):
    """The steepest direction: no other change of that size has a larger product with the gradient."""
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(1, *SHAPE, generator=generator)
    step = threat.step(torch.zeros(1, *SHAPE), gradient, 0.1)
    assert threat.distance(step, torch.zeros_like(step)) == pytest.approx(0.1)
    best = (step * gradient).sum()
    for _ in range(200):
        other = torch.randn(1, *SHAPE, generator=generator)
        other = other * (0.1 / threat.distance(other, torch.zeros_like(other)))
        assert (other * gradient).sum() <= best + 1e-6


@both_norms
def test_without_a_gradient_nothing_moves(threat, make_images):
    x = make_images(3, SHAPE)
    gradient = torch.randn(3, *SHAPE)
    gradient[1] = 0
    moved = threat.step(x, gradient, 0.1)
    assert torch.equal(moved[1], x[1])
    assert not torch.equal(moved[0], x[0])
    assert torch.isfinite(moved).all()


@both_norms
@pytest.mark.parametrize("kind", ["vector", "scalar", "float"])
def test_sizes_for_each_example_or_for_all(threat, kind):
    point, gradient = torch.zeros(3, *SHAPE), torch.randn(3, *SHAPE)
    sizes = torch.tensor([0.1, 0.2, 0.3]) if kind == "vector" else torch.full((3,), 0.2)
    given_sizes = {"vector": sizes, "scalar": torch.tensor(0.2), "float": 0.2}[kind]
    torch.testing.assert_close(threat.distance(threat.step(point, gradient, given_sizes), point), sizes)


@both_norms
@pytest.mark.parametrize("exponent", [-30, -25, -20, -10, 10, 20])
def test_the_length_of_a_step_does_not_depend_on_the_gradients_scale(threat, exponent):
    """Gradients of a confident model are as small as float32 can hold; squaring them must not lose them."""
    point, gradient = torch.zeros(3, *SHAPE), torch.randn(3, *SHAPE)
    small = threat.step(point, gradient * 10.0**exponent, 0.1)
    torch.testing.assert_close(small, threat.step(point, gradient, 0.1), atol=1e-6, rtol=1e-4)


@both_norms
def test_a_step_keeps_the_precision_of_the_point(threat):
    point = torch.zeros(2, *SHAPE)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        moved = threat.step(point.to(dtype), torch.randn(2, *SHAPE), torch.tensor([0.1, 0.2]))
        assert moved.dtype == dtype


def test_norms_are_in_float32_at_least():
    x = torch.full((2, 3, 20, 20), 100.0, dtype=torch.float16)
    torch.testing.assert_close(l2_norm(x), torch.full((2,), 100.0 * math.sqrt(1200)))
    assert l2_norm(x.double()).dtype == torch.float64


def test_per_example_shapes():
    like = torch.zeros(2, 3, 4, 4)
    assert per_example(torch.tensor([1.0, 2.0]), like).shape == (2, 1, 1, 1)
    assert per_example(0.5, like) == 0.5


# Random starts


@pytest.mark.parametrize("reset", [False, True])
def test_linf_noise_is_uniform_in_the_ball(reset):
    noise = Linf(0.1).sample(draws(2000), SHAPE, reset=reset)
    assert noise.shape == (2000, *SHAPE)
    assert noise.dtype == torch.float32
    assert noise.abs().max() <= 0.1
    for pixel in noise.flatten(1).T:
        assert kolmogorov((pixel + 0.1) / 0.2) < 2.0
    assert kolmogorov((noise + 0.1) / 0.2) < 1.6
    correlation = torch.corrcoef(noise.flatten(1).T) - torch.eye(math.prod(SHAPE))
    assert correlation.abs().max() < 4.5 / math.sqrt(2000)


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 2, 2), SHAPE])
def test_l2_noise_is_uniform_in_the_ball(reset, shape):
    """The d-th power of the radius is uniform, the direction has no preference, and they know nothing of each other."""
    size, count = math.prod(shape), 4000
    noise = L2(0.5).sample(draws(count), shape, reset=reset).flatten(1).double()
    radius = noise.norm(dim=1)
    assert radius.max() <= 0.5 + 1e-6
    assert kolmogorov((radius / 0.5) ** size) < 1.6
    covariance = noise.T @ noise / count
    expected = 0.25 / (size + 2) * torch.eye(size, dtype=torch.float64)
    assert (covariance - expected).abs().max() < 5 * 0.25 / (size + 2) / math.sqrt(count)
    assert noise.mean(0).abs().max() < 5 * math.sqrt(0.25 / (size + 2) / count)
    some = min(size, 4)  # every sector of the first coordinates has its share
    sectors = ((noise[:, :some] > 0).long() * 2 ** torch.arange(some)).sum(1)
    share = torch.bincount(sectors, minlength=2**some) / count
    assert (share - 2.0**-some).abs().max() < 5 * (2.0**-some / count) ** 0.5
    upper = radius > radius.median()
    assert noise[upper].sign().mean(0).abs().max() < 5 / math.sqrt(count / 2)


@both_norms
def test_a_random_start_is_the_image_plus_noise_inside_the_box(threat, make_images):
    x = make_images(6, SHAPE)
    start = threat.random_start(x, draws(6))
    torch.testing.assert_close(start, (x + threat.sample(draws(6), SHAPE)).clamp(0, 1))


@both_norms
def test_starts_and_resets_do_not_share_noise(threat):
    start, reset = (threat.sample(draws(500), SHAPE, reset=flag) for flag in (False, True))
    assert abs(float(torch.corrcoef(torch.stack([start.flatten(), reset.flatten()]))[0, 1])) < 0.05


@both_norms
def test_a_start_does_not_depend_on_the_batch(threat):
    whole = threat.sample(draws(10), SHAPE)
    part = threat.sample(CounterRNG(0, torch.tensor(0), torch.tensor([7, 2])), SHAPE)
    assert torch.equal(whole[[7, 2]], part)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-38, 1e-6, 1.0, 6e4, 1e19, 3e38])
@pytest.mark.parametrize("ball", [Linf(8 / 255), L2(0.5)], ids=str)
def test_a_step_is_as_long_as_asked_whatever_the_gradient(ball, scale, dtype):
    """Also where squares of the gradient, or its norm in half precision, would be zero or infinite."""
    gradient = (torch.tensor([[1.0, -1.0], [1.0, 1.0]]) * scale).to(dtype).view(2, 1, 1, 2)
    gradient = gradient.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
    moved = ball.step(torch.zeros(2, 1, 1, 2), gradient, 0.1)
    torch.testing.assert_close(moved, gradient.sign().float() * (0.1 if ball.name == "linf" else 0.1 / 2**0.5))
