"""Runs against each other: the order, and how far a difference on the same images can be trusted."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atas import report
from atas.evaluation.intervals import paired_difference
from atas.report.compare import rank
from atas.threat import Linf


@pytest.fixture
def runs_of(make_run):
    """Summaries of runs by the number of examples that hold under each attack."""

    def make(**right):
        folders = [make_run(name, right={"clean": 100, **counts} if counts else None) for name, counts in right.items()]
        return report.summarise(folders)

    return make


def test_order_and_differences(runs_of):
    found = rank(runs_of(low={"pgd10": 40}, best={"pgd10": 60, "fgsm": 70}, none=None))
    assert found.attacks == ["pgd10"]
    assert [(ranked.run.name, ranked.correct, ranked.gap) for ranked in found.runs] == [
        ("best", 60, 0),
        ("low", 40, -0.2),
    ]
    low, high = found.runs[1].gap_interval
    assert low < -0.2 < high < 0


def test_only_attacks_that_all_were_put_to_count(runs_of):
    found = rank(runs_of(a={"fgsm": 90, "pgd50": 10}, b={"fgsm": 80}))
    assert found.attacks == ["fgsm"]
    assert found.runs[0].run.name == "a"


def test_why_there_is_no_ranking(runs_of):
    assert "Fewer than two" in rank(runs_of(a={"fgsm": 1}, b=None))
    assert "no attack that all runs were evaluated with" in rank(runs_of(c={"fgsm": 1}, d={"pgd10": 1}))
    one, two = runs_of(e={"fgsm": 1}, f={"fgsm": 1})

    def changed(run, **values):
        return dataclasses.replace(run, evaluation=dataclasses.replace(run.evaluation, **values))

    assert "different images" in rank([one, changed(two, data="others")])
    assert "different threats" in rank([one, changed(two, threat=Linf(0.5))])


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=80))
def test_the_interval_against_its_formula(pairs):
    own, other = (torch.tensor(part) for part in zip(*pairs, strict=True))
    gained = sum(a and not b for a, b in pairs) + 0.5
    lost = sum(b and not a for a, b in pairs) + 0.5
    n = len(pairs) + 2
    middle = (gained - lost) / n
    half = 1.959963985 * math.sqrt(gained + lost - (gained - lost) ** 2 / n) / n
    assert paired_difference(own, other) == pytest.approx((middle - half, middle + half))
    low, high = paired_difference(other, own)
    assert paired_difference(own, other) == pytest.approx((-high, -low))


def test_the_interval_covers_the_truth():
    """Of 400 draws with a known difference, about 95% of the intervals hold it."""
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(400):
        first = torch.rand(200, generator=generator) < 0.6
        second = torch.where(
            torch.rand(200, generator=generator) < 0.2, torch.rand(200, generator=generator) < 0.3, first
        )
        low, high = paired_difference(first, second)
        covered += low <= 0.2 * (0.6 - 0.3) <= high
    assert 0.92 <= covered / 400 <= 0.98


def test_evaluations_without_clean_verdicts_count_them(make_run):
    """An example that is wrong without an attack does not hold."""
    folder = make_run("one", right={"clean": 50, "fgsm": 80})
    other = make_run("two", right={"clean": 50, "fgsm": 40})
    found = rank(report.summarise([folder, other]))
    assert [ranked.correct for ranked in found.runs] == [50, 40]
