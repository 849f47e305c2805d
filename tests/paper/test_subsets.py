"""Ranks, tenths and what is counted in them, against references that are slow and obvious."""

import itertools
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atas.paper import gradient_norms, subsets

NORMS = st.lists(st.integers(0, 30), min_size=1, max_size=60)  # few values: ties are common


def slow_rank(norms, i):
    return Fraction(sum(other < norms[i] for other in norms), len(norms))


@settings(deadline=None)
@given(NORMS)
def test_deciles_follow_the_definition(norms):
    values = torch.tensor(norms, dtype=torch.float32)
    expected = [slow_rank(norms, i) for i in range(len(norms))]
    tenth = gradient_norms.deciles(values)
    for i, rank in enumerate(expected):
        (where,) = [j for j in range(1, 11) if Fraction(j - 1, 10) <= rank < Fraction(j, 10)]
        assert tenth[i] == where


@pytest.mark.parametrize("count", [10, 50, 1000])
def test_tenths_of_distinct_norms_are_of_one_size_and_in_order(count, generator):
    norms = torch.rand(count, generator=generator, dtype=torch.float64)
    tenth = gradient_norms.deciles(norms)
    parts = [gradient_norms.decile_members(tenth, number, number) for number in range(1, 11)]
    assert [len(part) for part in parts] == [count // 10] * 10
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(count))
    assert all(norms[low].max() < norms[high].min() for low, high in itertools.pairwise(parts))
    assert torch.equal(gradient_norms.decile_members(tenth, 1, 4), torch.cat(parts[:4]).sort().values)
    assert torch.equal(gradient_norms.decile_members(tenth, 9, 10), torch.cat(parts[8:]).sort().values)


def test_the_average_is_over_epochs_that_have_a_norm():
    norms = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 2.0], [3.0, 5.0, 4.0]])
    assert gradient_norms.mean_norms(norms).tolist() == [2.0, 5.0, 3.0]


def test_class_shares_are_counted_and_sum_to_one(generator):
    tenth = gradient_norms.deciles(torch.rand(200, generator=generator))
    labels = torch.randint(0, 7, (200,), generator=generator)
    shares = gradient_norms.class_shares(tenth, labels, 7)
    assert shares.sum(1).tolist() == pytest.approx([1.0] * 10)
    for number in range(1, 11):
        rows = [label for label, one in zip(labels.tolist(), tenth.tolist(), strict=True) if one == number]
        assert shares[number - 1].tolist() == pytest.approx([rows.count(c) / len(rows) for c in range(7)])


def test_means_by_tenth(generator):
    values = torch.rand(3, 100, generator=generator)
    tenth = gradient_norms.deciles(torch.rand(100, generator=generator))
    means = gradient_norms.means_by_decile(values, tenth)
    for epoch in range(3):
        for number in range(1, 11):
            rows = [values[epoch, i].item() for i in range(100) if tenth[i] == number]
            assert means[epoch, number - 1].item() == pytest.approx(sum(rows) / len(rows))


def test_the_tail_is_one_for_equal_norms_and_has_no_unit(generator):
    assert gradient_norms.tail(torch.full((9,), 3.0)) == pytest.approx(1)
    assert gradient_norms.tail(torch.tensor([1.0, 3.0])) == pytest.approx(5 / 4)
    norms = torch.rand(50, generator=generator)
    assert gradient_norms.tail(norms) > 1
    assert gradient_norms.tail(128 * norms) == pytest.approx(gradient_norms.tail(norms))


@settings(deadline=None)
@given(st.integers(100, 60_000), st.integers(1, 9), st.sampled_from([32, 128]), st.integers(5, 40))
def test_iterations_are_equal_to_half_an_epoch(examples, tenths, batch_size, epochs):
    part = max(1, examples * tenths // 10)
    steps = -(-part // batch_size)
    found = subsets.equal_epochs(examples, part, batch_size, epochs) * steps
    assert abs(found - epochs * -(-examples // batch_size)) <= steps / 2


def test_the_papers_subsets_differ_by_less_than_half_a_percent():
    for part in (10_000, 15_000, 20_000):
        found = subsets.equal_epochs(50_000, part, 128, 30) * -(-part // 128)
        assert found == pytest.approx(30 * 391, rel=0.005)
