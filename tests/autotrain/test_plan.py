"""Plans: never fewer epochs for more minutes, and nothing beyond the time."""

from hypothesis import given
from hypothesis import strategies as st

from atas.autotrain.plan import ATTACKS, MIN_EPOCHS, Costs, choose_attacks, plan_training

WORK = (10_802.5, 2400.0, 127.5, 27.5)  # of the attacks for ten classes
sizes = st.integers(10, 2_000_000)
seconds = st.floats(1, 1e6)
costs = st.builds(Costs, st.floats(1e-5, 100), st.floats(0, 1000), st.floats(0, 1000), st.floats(1e-8, 1))


@given(costs=costs, steps=st.integers(1, 10_000), tests=st.integers(1, 50_000), one=seconds, more=seconds)
def test_more_minutes_never_give_fewer_epochs(costs, steps, tests, one, more):
    fewer, longer = (plan_training(time, steps, costs, tests, WORK) for time in sorted((one, more)))
    assert MIN_EPOCHS <= fewer.epochs <= longer.epochs
    assert fewer.evaluation_seconds <= longer.evaluation_seconds


@given(costs=costs, steps=st.integers(1, 10_000), tests=st.integers(1, 50_000), time=seconds)
def test_training_and_evaluation_fit_into_the_time(costs, steps, tests, time):
    plan = plan_training(time, steps, costs, tests, WORK)
    assert plan.evaluation_seconds <= 0.4 * time * (1 + 1e-9)
    fits = plan.training_seconds + plan.evaluation_seconds <= time * (1 + 1e-9)
    assert fits or plan.too_short
    assert not plan.too_short or plan.epochs == MIN_EPOCHS


@given(left=st.floats(-100, 1e5), time=seconds, query=st.floats(1e-9, 1), robust=st.floats(0, 1), tests=sizes)
def test_at_least_a_hundred_images_are_evaluated(left, time, query, robust, tests):
    count, attacks = choose_attacks(left, time, query, robust, tests, WORK)
    assert min(tests, 100) <= count <= tests
    assert attacks in ATTACKS
