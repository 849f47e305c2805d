"""Wilson's interval."""

import pytest

from atas.errors import UsageError
from atas.evaluation import wilson


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [(0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (50, 100, 0.4038, 0.5962), (1, 1, 0.2065, 1.0), (5, 5, 0.5655, 1.0)],
)
def test_known_values(successes, n, low, high):
    assert wilson(successes, n) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.999])
@pytest.mark.parametrize(("successes", "n"), [(0, 3), (1, 7), (4800, 10000), (9999, 10000), (7, 7)])
def test_scipy_agrees(successes, n, confidence):
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    expected = stats.binomtest(successes, n).proportion_ci(confidence, method="wilson")
    assert wilson(successes, n, confidence) == pytest.approx(tuple(expected), abs=1e-12)


def test_ends_are_exact_and_hold_the_fraction():
    for n in (1, 3, 10, 997):
        assert wilson(0, n)[0] == 0.0
        assert wilson(n, n)[1] == 1.0
        for successes in range(n + 1):
            low, high = wilson(successes, n)
            assert 0 <= low <= successes / n <= high <= 1


@pytest.mark.parametrize("arguments", [(1, 0), (-1, 5), (6, 5), (1, 5, 0.0), (1, 5, 1.0), (1, 5, 95)])
def test_nonsense_is_refused(arguments):
    with pytest.raises(UsageError):
        wilson(*arguments)
