"""The paper's theory: both algorithms against plain loops, the bounds, and every slip as printed and as mended."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from atas._utils.plotting import save_figure
from atas.errors import UsageError
from atas.paper.theory import bounds, experiment, problems, render
from atas.paper.theory.problems import Constants, cycle, linear, long_tail, run_sgdbca, saddle, tail

BETA = 0.5
both = pytest.mark.parametrize("beta", [BETA, None], ids=["asgdbca", "sgdbca"])
TINY = experiment.Sizes(
    n=4,
    repetitions=3,
    horizons=(20, 60),
    tail=2.0,
    tails=(1.0, 3.0),
    tail_steps=100,
    few=4,
    few_steps=120,
    examples=(1, 4),
    example_steps=100,
    cycles=(10, 100),
)


def go(problem, steps, rates, beta, *, start="uniform", repetitions=16, seed=0):
    draw = np.random.default_rng(seed)
    n, shape = len(problem.scale), (repetitions, *problem.direction.shape)
    wrong = np.broadcast_to(-problem.best_response(problem.solution), shape)
    x = draw.uniform(-problem.eps, problem.eps, shape) if start == "uniform" else wrong
    theta = np.zeros((repetitions, len(problem.slope)))
    return run_sgdbca(problem, draw.integers(n, size=(steps, repetitions)), rates, beta, theta, x)


def random_problem(seed):
    draw = np.random.default_rng(seed)
    n = int(draw.integers(2, 20))
    return saddle(
        long_tail(n, draw.uniform(1, math.sqrt(n))),
        d=int(draw.integers(1, 6)),
        p=int(draw.integers(1, 6)),
        curvature=draw.choice([0.0, 0.3, 3.0]),
        push=draw.uniform(-1, 1),
        even=bool(seed % 2),
        seed=seed,
    )


def points(problem, count=200, seed=0):
    """Weights and perturbations anywhere in their domains."""
    draw = np.random.default_rng(seed)
    theta = problem.project(draw.normal(size=(count, len(problem.slope))) * 2)
    return theta, draw.uniform(-problem.eps, problem.eps, (count, *problem.direction.shape))


# The problem


def losses(problem, theta, x):
    """Each example's loss by its formula, in torch."""
    scale, coupling, direction, slope = map(
        torch.tensor, (problem.scale, problem.coupling, problem.direction, problem.slope)
    )
    inner = (problem.push + coupling @ theta) * (direction * x).sum(1) - problem.curvature / 2 * (x * x).sum(1)
    return slope @ theta + scale * inner


@pytest.mark.parametrize("seed", range(4))
def test_values_and_gradients_are_those_of_the_formula(seed):
    problem = random_problem(seed)
    theta, x = (torch.tensor(array[0], requires_grad=True) for array in points(problem, 1))
    found = losses(problem, theta, x)
    here = theta.detach().numpy(), x.detach().numpy()
    assert float(problem.phi(*here)) == pytest.approx(float(found.mean().detach()))
    (by_x,) = torch.autograd.grad(found.sum(), x, retain_graph=True)
    np.testing.assert_allclose(problem.gradient_x(*here), by_x.numpy(), atol=1e-12)
    for k in range(len(problem.scale)):
        (by_theta,) = torch.autograd.grad(found[k], theta, retain_graph=True)
        np.testing.assert_allclose(problem.gradient_theta(here[1][k], np.array(k)), by_theta.numpy(), atol=1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_the_planted_point_is_a_saddle_point_and_best_answers_are_best(seed):
    problem = random_problem(seed)
    theta, x = points(problem)
    assert (problem.phi(theta, x) <= problem.robust_loss(theta) + 1e-12).all()
    assert (problem.phi(theta, x) >= problem.min_over_ball(*problem.line(x)) - 1e-12).all()
    assert (problem.robust_loss(theta) >= problem.value - 1e-12).all()
    slope, height = problem.line(problem.best_response(problem.solution))
    assert float(problem.min_over_ball(slope, height)) == pytest.approx(problem.value)


@pytest.mark.parametrize("seed", range(6))
def test_constants_hold_everywhere_and_are_attained(seed):
    problem = random_problem(seed)
    of = problem.constants
    theta, x = points(problem)
    assert (np.linalg.norm(problem.gradient_x(theta, x), axis=-1) <= of.norms + 1e-12).all()
    # The largest gradient of an example: weights along its coupling, every coordinate against its pull.
    sign = 1.0 if problem.push >= 0 else -1.0
    for i, norm in enumerate(of.norms):
        worst = sign * problem.radius * problem.coupling[i]
        against = -problem.eps * np.sign(sign * problem.direction)
        assert np.linalg.norm(problem.gradient_x(worst, against)[i]) == pytest.approx(norm)
    corners = problem.eps * np.sign(problem.direction)
    every = np.arange(len(problem.scale))
    ends = [np.sum(problem.gradient_theta(side * corners, every) ** 2, axis=1) for side in (-1, 1)]
    assert np.mean(np.maximum(*ends)) == pytest.approx(of.gradient_theta**2)


@pytest.mark.parametrize("ratio", [1.0, 1.4, 2.0, 5.0])
def test_a_long_tail_is_as_long_as_asked(ratio):
    scale = long_tail(32, ratio)
    assert np.mean(scale) == pytest.approx(1)
    assert tail(scale) == pytest.approx(ratio)
    assert (np.diff(scale) >= 0).all()


# The algorithms


def slow(problem, order, rates, beta, theta, x):
    """One repetition, coordinate by coordinate, with every iterate kept."""
    n, d = problem.direction.shape
    p = len(theta)
    theta, x = [float(value) for value in theta], [[float(value) for value in row] for row in x]
    v, peak, seen = [0.0] * n, [0.0] * n, []
    for k in order:
        moved, new = [], []
        for i in range(n):
            margin = problem.push + sum(problem.coupling[i, q] * theta[q] for q in range(p))
            gradient = [
                problem.scale[i] * (margin * problem.direction[i, j] - problem.curvature * x[i][j]) for j in range(d)
            ]
            step = rates.x
            if beta is not None:
                average = beta * v[i] + (1 - beta) * sum(value**2 for value in gradient)
                new.append((average, max(peak[i], average)))
                step = rates.x / math.sqrt(new[i][1]) if new[i][1] else 0.0
            point = [x[i][j] + step * gradient[j] for j in range(d)]
            moved.append([min(max(value, -problem.eps), problem.eps) for value in point])
        seen.append((list(theta), [list(row) for row in x], moved))
        x[k] = list(moved[k])
        if beta is not None:
            v[k], peak[k] = new[k]
        reach = problem.scale[k] * sum(problem.direction[k, j] * x[k][j] for j in range(d))
        theta = [theta[q] - rates.theta * (problem.slope[q] + reach * problem.coupling[k, q]) for q in range(p)]
        norm = math.sqrt(sum(value**2 for value in theta))
        if norm > problem.radius:
            theta = [value * problem.radius / norm for value in theta]
    return theta, x, peak, seen


@both
@pytest.mark.parametrize("seed", range(4))
def test_algorithms_are_those_of_the_plain_loop(beta, seed):
    problem, steps = random_problem(seed), 60
    draw = np.random.default_rng(seed)
    order = draw.integers(len(problem.scale), size=(steps, 2))
    theta, x = points(problem, 2, seed)
    rates = bounds.step_sizes(problem.constants, steps, beta)
    found = run_sgdbca(problem, order, rates, beta, theta, x)
    plain = [slow(problem, order[:, row], rates, beta, theta[row], x[row]) for row in range(2)]
    for row, (last_theta, last_x, peak, seen) in enumerate(plain):
        np.testing.assert_allclose(found.theta[row], last_theta, atol=1e-10)
        np.testing.assert_allclose(found.x[row], last_x, atol=1e-10)
        np.testing.assert_allclose(found.peak[row], peak, atol=1e-10)
        thetas, before, moved = (np.array(part) for part in zip(*seen, strict=True))
        defined = problem.robust_loss(thetas) - problem.min_over_ball(*problem.line(before))
        assert found.regret_defined[row] == pytest.approx(defined.sum())
        # The best comparators of the repetition, and their sums over the steps, one by one.
        best = problem.best_response(thetas.mean(0))
        slope = problem.line(moved)[0].mean(0)
        least = -problem.radius * slope / max(np.linalg.norm(slope), 1e-300)
        regret = sum(problem.phi(at, best) - problem.phi(least, x_t) for at, x_t in zip(thetas, moved, strict=True))
        assert found.regret_after[row] == pytest.approx(regret)
        assert found.gap[row] == pytest.approx(problem.robust_loss(thetas.mean(0)) - problem.value)
    thetas = np.array([[at for at, _, _ in seen] for *_, seen in plain])
    moved = np.array([[x_t for _, _, x_t in seen] for *_, seen in plain])
    values = problem.phi(thetas, moved).sum() / 2
    assert found.regret_x == pytest.approx(steps * float(problem.robust_loss(thetas.mean((0, 1)))) - values)
    lines = problem.line(moved)
    least = float(problem.min_over_ball(lines[0].mean(1).mean(0), lines[1].mean()))
    assert found.regret == pytest.approx(steps * (float(problem.robust_loss(thetas.mean((0, 1)))) - least))


def test_an_example_without_a_gradient_stays():
    problem = dataclasses.replace(linear(np.ones(3)), push=0.0)
    found = go(problem, 10, problems.StepSizes(0.1, 1.0), BETA)
    assert (found.peak == 0).all()
    assert found.weighted == 0
    assert np.isfinite(found.x).all()


# The bounds


@both
@pytest.mark.parametrize("seed", range(9))
@pytest.mark.slow
def test_mended_bounds_hold_on_random_problems_at_any_step_size(beta, seed):
    problem = random_problem(seed)
    of, steps = problem.constants, 40 * (1 + seed)
    best = bounds.step_sizes(of, steps, beta)
    for factor in (0.3, 1.0, 3.0):
        rates = problems.StepSizes(best.theta * factor, best.x * factor)
        limit = bounds.bound(of, steps, rates, beta)
        for start in ("uniform", "wrong"):
            found = go(problem, steps, rates, beta, start=start)
            assert found.regret <= limit.regret
            assert steps * found.gap.mean() <= limit.gap
            # Weights that are chosen in hindsight, too, cost what theta's own term says once more.
            hindsight = of.gradient_theta * of.diameter_theta * math.sqrt(steps)
            assert found.regret_after.mean() <= limit.gap + hindsight


def test_bounds_of_a_case_computed_by_hand():
    """A bound that is too loose holds as well, so only its value tells."""
    of = Constants(diameter_theta=2, gradient_theta=3, diameter_x=0.5, norms=np.array([3.0, 4.0]), smoothness=1.5, d=8)
    at, root = problems.StepSizes(theta=0.1, x=0.2), math.sqrt(800)
    terms = {
        "plain": (bounds.bound(of, 100, at, None), (20 + 45, 10 + 125, 37.5, 2.5 * root)),
        "adaptive": (bounds.bound(of, 100, at, 0.75), (20 + 45, 7 * (5 + 10), 12, 7 * 0.5 * 20)),
        "sharp": (bounds.sharp_bound(of, 100, at, 0.75), (20 + 45, 7 * (10 + 0.2 * 56) / 2, 12, 7 * 0.5 * 20)),
        "smooth": (bounds.smooth_bound(of, 100, at), (20 + 45, 10, 0, 20)),
        "printed plain": (bounds.printed_bound(of, 100, None), (60, 2.5 * 20, 0.75, 0)),
        "printed adaptive": (bounds.printed_bound(of, 100, 15 / 16), (60, 3.5 * root, 1.5, 0)),
    }
    for name, (found, expected) in terms.items():
        assert dataclasses.astuple(found) == pytest.approx(expected), name


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_the_sharper_bound_holds_too(beta, seed):
    problem = random_problem(seed)
    of, steps = problem.constants, 300
    best = bounds.sharp_step_sizes(of, steps)
    for factor in (0.3, 1.0, 3.0):
        rates = problems.StepSizes(best.theta, best.x * factor)
        limit = bounds.sharp_bound(of, steps, rates, beta)
        found = go(problem, steps, rates, beta, start="wrong")
        assert found.regret <= limit.regret
        assert steps * found.gap.mean() <= limit.gap


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_sum_that_the_sharper_bound_rests_on(beta):
    """Norms that jump about, grow without end, or come as one peak: their squares over the root of v-hat."""
    draw, visits = np.random.default_rng(0), 60
    sequences = [draw.pareto(1, visits) for _ in range(50)] + [draw.uniform(0.01, 1, visits) for _ in range(50)]
    sequences += [rate ** np.arange(visits) for rate in (0.5, 1.01, 1.5, 3.0)] + [np.eye(visits)[at] for at in (0, 59)]
    for norms in sequences:
        v = peak = total = 0.0
        for norm in norms:
            v = beta * v + (1 - beta) * norm**2
            peak = max(peak, v)
            total += norm**2 / math.sqrt(peak) if peak else 0.0
        assert total <= max(norms) * (visits + 2 * beta / (1 - beta)) * (1 + 1e-12)


def test_with_the_sharper_bound_adapting_never_costs_anything_in_the_long_run():
    for length in (1.0, 2.0):
        of, steps = saddle(long_tail(10, length)).constants, 10**8
        adaptive = bounds.sharp_bound(of, steps, bounds.sharp_step_sizes(of, steps), BETA).x
        plain = bounds.bound(of, steps, bounds.step_sizes(of, steps, None), None).x
        assert plain / adaptive == pytest.approx(bounds.sharp_ratio(length), rel=1e-3)


@both
def test_the_step_sizes_are_the_best_ones(beta):
    of, steps = saddle(long_tail(10, 2.0)).constants, 1000
    of = dataclasses.replace(of, smoothness=0.0)
    best = bounds.step_sizes(of, steps, beta)
    least = bounds.bound(of, steps, best, beta)
    for factor in (0.9, 1.1):
        assert bounds.bound(of, steps, problems.StepSizes(best.theta, best.x * factor), beta).x > least.x
        assert bounds.bound(of, steps, problems.StepSizes(best.theta * factor, best.x), beta).theta > least.theta
    printed = bounds.printed_bound(of, steps, beta)
    assert least.theta == pytest.approx(printed.theta)
    assert least.x == pytest.approx(math.sqrt(of.n) * printed.x)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.slow
def test_smoothness_alone_bounds_the_maximisers_part(seed):
    problem = saddle(long_tail(8, 2.0), curvature=1.0, seed=seed)
    of = problem.constants
    limits = []
    for steps in (100, 1600):
        rates = bounds.smooth_step_sizes(of, steps)
        limit = bounds.smooth_bound(of, steps, rates)
        found = go(problem, steps, rates, None, start="wrong", seed=seed)
        assert found.regret_x <= limit.x
        assert found.regret <= limit.regret
        assert steps * found.gap.mean() <= limit.gap
        limits.append(limit)
    assert limits[0].x == limits[1].x, "it does not grow with the steps"


@both
@pytest.mark.parametrize("seed", range(6))
def test_the_lemma_holds_in_every_repetition(beta, seed):
    problem, steps = random_problem(seed), 300
    found = go(problem, steps, bounds.step_sizes(problem.constants, steps, beta), beta, seed=seed)
    assert (found.gap >= -1e-12).all()
    assert (steps * found.gap <= found.regret_after + 1e-9).all()
    assert (steps * found.gap <= found.regret_defined + 1e-9).all()
    assert found.regret <= found.regret_after.mean() + 1e-9


# (a) The ratio of the bounds


@pytest.mark.parametrize("beta", [0.0, 0.5, 0.9])
def test_the_ratio_of_the_second_terms(beta):
    for seed in range(5):
        of = saddle(np.random.default_rng(seed).pareto(2, 20) + 1, seed=seed).constants
        for form in (bounds.printed_bound, lambda *of: bounds.bound(of[0], of[1], bounds.step_sizes(*of), of[2])):
            found = form(of, 500, None).x / form(of, 500, beta).x
            assert found == pytest.approx(bounds.ratio(tail(of.norms), beta))
            if beta:
                assert found < 0.9 * bounds.printed_ratio(tail(of.norms), beta)


@pytest.mark.slow
def test_equal_norms_favour_the_algorithm_that_does_not_adapt():
    """By the printed ratio its bound is 1.19 times as large; it regrets less."""
    problem, steps = linear(np.ones(8)), 3000
    of = problem.constants
    regret = {
        beta: go(problem, steps, bounds.step_sizes(of, steps, beta), beta, start="wrong", repetitions=4).regret
        for beta in (BETA, None)
    }
    found = regret[None] / regret[BETA]
    assert bounds.ratio(1.0, BETA) <= found < 1 < bounds.printed_ratio(1.0, BETA)


@pytest.mark.slow
def test_the_ratio_grows_with_the_tail_as_stated():
    """Somewhat above the ratio of the bounds: v-hat starts low, so ASGDBCA's first steps are longer than its rate."""
    steps, ratios = 3000, {}
    for length in (1.0, 2.0, 3.0):
        problem = linear(long_tail(8, length))
        of = problem.constants
        plain, adaptive = (
            go(problem, steps, bounds.step_sizes(of, steps, beta), beta, start="wrong", repetitions=32).regret
            for beta in (None, BETA)
        )
        ratios[length] = plain / adaptive
        assert ratios[length] == pytest.approx(bounds.ratio(length, BETA), rel=0.15)
    assert ratios[1.0] < 1 < ratios[2.0] < ratios[3.0]
    assert bounds.ratio(bounds.break_even_tail(BETA), BETA) == pytest.approx(1)
    assert bounds.break_even_tail(BETA) == pytest.approx(math.sqrt(2))


# (b) The third term


def test_squared_gradients_over_v_hat_add_up_to_n_parts():
    problem, steps = saddle(long_tail(16, 2.0)), 400
    rates = bounds.step_sizes(problem.constants, steps, BETA)
    first = go(problem, 1, rates, BETA)
    assert first.weighted == pytest.approx(bounds.weighted_limit(16, BETA)), "attained by the first step"
    found = go(problem, steps, rates, BETA)
    assert bounds.printed_weighted_limit(BETA) < found.weighted <= bounds.weighted_limit(16, BETA)


def test_third_term_is_bounded_as_the_page_says():
    """With all else as printed: the factor in front, the printed step size, and the sum over the examples."""
    of, steps = saddle(long_tail(16, 2.0)).constants, 400
    eta = bounds.printed_step_sizes(of, steps, BETA).x
    front = steps * of.smoothness * eta**2 / (2 * of.n**2)
    right = of.d * of.smoothness * of.diameter_x**2 / (2 * of.n * math.sqrt(1 - BETA))
    assert front * bounds.weighted_limit(of.n, BETA) == pytest.approx(right)
    assert front * bounds.printed_weighted_limit(BETA) == pytest.approx(bounds.printed_bound(of, steps, BETA).smooth)
    assert bounds.printed_bound(of, steps, BETA).smooth == pytest.approx(right / of.n)


# (c) The ratio in the paper's table


def test_the_ratio_of_the_figure_is_not_the_ratio_of_the_bounds():
    norms = long_tail(1000, 1.4)
    assert tail(norms) == pytest.approx(1.4), "what the figure's caption defines"
    assert bounds.printed_ratio(tail(norms), BETA) == pytest.approx(1.407, abs=1e-3), "what the text defines"
    of = dataclasses.replace(saddle(np.ones(1000)).constants, norms=norms)
    terms = bounds.printed_bound(of, 100, None).x / bounds.printed_bound(of, 100, BETA).x
    assert terms == pytest.approx(0.995, abs=1e-3), "what the two theorems say"
    assert [round(bounds.ratio(value, BETA), 2) for value in (1.4, 1.5, 1.6)] == [0.99, 1.03, 1.06]


# (d) A step moves one example, not all of them


def test_the_distance_falls_by_all_of_a_step_not_by_one_part_in_n():
    problem = saddle(long_tail(6, 2.0))
    theta, x = (array[0] for array in points(problem, 1))
    goal = problem.best_response(problem.solution)
    moved = np.clip(x + 0.1 * problem.gradient_x(theta, x), -problem.eps, problem.eps)

    def fall(after, rows):
        return np.sum((x - goal)[rows] ** 2) - np.sum((after - goal)[rows] ** 2)

    everyone = np.arange(6)
    steps = [np.where(everyone[:, None] == k, moved, x) for k in everyone]
    of_the_picked = np.mean([fall(after, k) for k, after in zip(everyone, steps, strict=True)])
    of_all = np.mean([fall(after, everyone) for after in steps])
    assert of_the_picked == pytest.approx(of_all), "the others do not move"
    assert of_the_picked == pytest.approx(fall(moved, everyone) / 6), "as printed, only if all of them moved"


@both
@pytest.mark.parametrize("n", [3, 16])
@pytest.mark.slow
def test_the_theorems_fail_at_their_own_step_sizes_and_hold_when_mended(beta, n):
    problem, steps = linear(np.ones(n)), 2000
    of = problem.constants
    rates = bounds.printed_step_sizes(of, steps, beta)
    found = go(problem, steps, rates, beta, start="wrong", repetitions=4)
    printed = bounds.printed_bound(of, steps, beta).regret
    assert found.regret > 1.3 * printed
    assert found.regret == pytest.approx(n / 2 * printed, rel=0.1)
    assert found.regret <= bounds.bound(of, steps, rates, beta).regret == pytest.approx((n + 1) / 2 * printed)


@both
@pytest.mark.slow
def test_the_printed_bounds_fail_at_the_best_step_sizes_too(beta):
    problem, steps = linear(np.ones(64)), 3000
    of = problem.constants
    rates = bounds.step_sizes(of, steps, beta)
    found = go(problem, steps, rates, beta, start="wrong", repetitions=4)
    assert bounds.printed_bound(of, steps, beta).regret < found.regret <= bounds.bound(of, steps, rates, beta).regret


# (e) What is bounded: one comparator for all steps


def test_the_regret_as_defined_grows_with_the_steps():
    problem, shares = cycle(), []
    for steps in (100, 400, 1600):
        rates = bounds.step_sizes(problem.constants, steps, None)
        start = np.full((1, 1), problem.radius / 2), np.zeros((1, 1, 1))
        found = run_sgdbca(problem, np.zeros((steps, 1), dtype=np.int64), rates, None, *start)
        limit = bounds.bound(problem.constants, steps, rates, None).regret
        assert limit == pytest.approx(bounds.printed_bound(problem.constants, steps, None).regret), "n is 1"
        assert found.regret <= limit < found.regret_defined[0]
        shares.append(found.regret_defined[0] / steps)
    assert shares == pytest.approx([shares[0]] * 3, rel=0.02)


# (f) Where the gradient by theta is taken


def test_the_gradient_by_theta_is_that_at_perturbations_which_have_all_moved():
    problem = saddle(long_tail(6, 2.0))
    theta, x = (array[0] for array in points(problem, 1))
    moved = np.clip(x + 0.5 * problem.gradient_x(theta, x), -problem.eps, problem.eps)
    mean = np.mean([problem.gradient_theta(moved[k], np.array(k)) for k in range(6)], axis=0)
    np.testing.assert_allclose(mean, problem.line(moved)[0], atol=1e-12)
    ones = np.stack([np.where(np.arange(6)[:, None] == k, moved, x) for k in range(6)])
    one_moved = np.mean(problem.line(ones)[0], axis=0)
    assert np.linalg.norm(mean - one_moved) > 0.5 * np.linalg.norm(mean - problem.line(x)[0]) > 0


# The study


@pytest.fixture(scope="module")
def result():
    return experiment.run_experiment(sizes=TINY)


def test_the_study_is_plain_data_and_depends_on_its_seed_alone(result):
    text = json.dumps(result.to_json())
    assert json.dumps(experiment.run_experiment(sizes=TINY).to_json()) == text
    assert json.dumps(experiment.run_experiment(sizes=TINY, seed=1).to_json()) != text
    assert [row.steps for row in result.horizons] == [20, 60] * 4
    assert {row.problem for row in result.tails} == {"linear", "saddle"}
    assert [at for at, _ in result.measured_ratios("linear")] == pytest.approx([1.0, 3.0])
    for row in (*result.horizons, *result.tails, *result.examples, *result.cycle):
        assert row.regret <= row.bound.regret
        assert row.steps * row.gap <= min(row.regret_after, row.regret_defined, row.bound.gap)


def test_a_momentum_out_of_range():
    with pytest.raises(UsageError, match="beta must be at least 0 and less than 1; got 1"):
        experiment.run_experiment(beta=1)


@pytest.mark.slow
def test_run_writes_four_files(tmp_path):
    render.write_results(tmp_path / "new" / "folder", quick=True, sizes=TINY)
    folder = tmp_path / "new" / "folder"
    assert sorted(path.name for path in folder.iterdir()) == ["theory.json", "theory.md", "theory.png", "theory.svg"]
    found = json.loads((folder / "theory.json").read_text())
    assert found["environment"]["atas"]
    assert found["sizes"]["n"] == 4
    rows = [line for line in (folder / "theory.md").read_text().splitlines() if line.startswith("|")]
    assert "| 12/255 | 1.5 | 1.030 | 1.061 | 1.225 | 1.261 |" in rows
    assert (folder / "theory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_equal_results_give_equal_figures(result, tmp_path):
    for kind in ("png", "svg", "pdf"):
        once, again = (tmp_path / name / f"theory.{kind}" for name in ("once", "again"))
        for path in (once, again):
            save_figure(render.draw(result), path)
        assert once.read_bytes() == again.read_bytes()


@pytest.mark.slow
def test_a_plot_of_an_unknown_kind(result, tmp_path):
    with pytest.raises(UsageError, match=r"use \.png, \.svg or \.pdf"):
        save_figure(render.draw(result), tmp_path / "theory.xyz")


def test_both_ratios_of_the_bounds():
    printed, right = bounds.both_ratios(2**0.5, 0.5)
    assert right == pytest.approx(1)  # the bounds are equal at a tail of 1.414
    assert printed == pytest.approx(2**0.5)
