"""What whoever watches is told: what is being done, how much of it, and how long the rest takes at most."""

import time
from itertools import pairwise

import atas
from atas.evaluation import evaluate

BALL = atas.Linf(0.15)


def watched(problem, **options):
    model, x, y = problem
    seen = []
    evaluate(model, x[:50], y[:50], BALL, progress=seen.append, **options)
    return seen


def test_attacks_and_stages_are_named_in_their_order(robust_digits, tiny):
    seen = watched(robust_digits, attacks=["fgsm", "pgd5x2", tiny])
    named = list(dict.fromkeys((status.attack, status.doing) for status in seen))
    assert named == [
        ("clean", "clean"),
        ("fgsm", "fgsm"),
        ("pgd5x2", "restart 1 of 2"),
        ("pgd5x2", "restart 2 of 2"),
        *(("tiny", name) for name in ("apgd-ce", "apgd-t", "fab-t", "square")),
    ]
    assert all(status.note is None for status in seen)


def test_examples_that_hold_are_counted_down(robust_digits, tiny):
    model, x, y = robust_digits
    result = evaluate(model, x[:50], y[:50], BALL, attacks=[tiny])
    seen = [status for status in watched(robust_digits, attacks=[tiny]) if status.attack == "tiny"]
    right = [status.right for status in seen]
    assert right == sorted(right, reverse=True)
    assert (right[0], right[-1]) == (result.correct["clean"].sum(), result.correct["tiny"].sum())
    assert {status.examples for status in seen} == {50}


def test_the_share_grows_to_one_and_the_time_left_falls_to_nothing(robust_digits, tiny):
    for options in ({"attacks": [tiny]}, {"attacks": ["pgd10x2", tiny], "batch_size": 8}, {"attacks": ["fgsm"]}):
        seen = watched(robust_digits, **options)
        done = [status.done for status in seen]
        assert done[0] < 0.1
        assert done[-1] == 1
        assert all(0 <= share <= 1 for share in done)
        assert done == sorted(done)
        left = [status.seconds_left for status in seen]
        assert left[0] is None
        assert left[-1] == 0
        assert all(seconds >= 0 for seconds in left if seconds is not None)


def test_the_time_left_is_an_upper_bound_that_is_not_far_off(robust_digits, tiny):
    """Halfway through the work, of the time that it took; generous, since other work may go on beside."""
    seen = []
    evaluate(*robust_digits, BALL, attacks=[tiny, "pgd50x3"], progress=lambda s: seen.append((time.monotonic(), s)))
    end = seen[-1][0]
    middle = next(entry for entry in seen if entry[1].done > 0.5)
    assert middle[1].seconds_left < 10 * max(end - middle[0], 0.05)
    assert middle[1].seconds_left > 0.1 * (end - middle[0])


def test_work_is_counted_in_forward_passes(robust_digits, tiny):
    """A query of Square is less work than a step with a gradient, so the share grows more slowly in it."""
    pace = {}
    seen = [status for status in watched(robust_digits, attacks=[tiny], batch_size=50) if status.attack == "tiny"]
    for before, after in pairwise(seen):
        if before.doing == after.doing and before.right == after.right:
            pace.setdefault(after.doing, after.done - before.done)
    assert 0 < pace["square"] < 0.5 * pace["apgd-t"]
