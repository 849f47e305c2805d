"""Randomness by counter: uniform, without history, and the same for ever."""

import itertools
import math

import pytest
import torch

from atas.core.rng import CounterRNG, Stream, generator_seed

COUNT = 4000


def draw(seed=0, epoch=0, index=None):
    return CounterRNG(seed, torch.tensor(epoch), torch.arange(COUNT) if index is None else torch.as_tensor(index))


def correlation(first, second):
    """In units of what chance makes of it."""
    pair = torch.stack([first.flatten(), second.flatten()]).double()
    return abs(float(torch.corrcoef(pair)[0, 1])) * math.sqrt(pair.shape[1])


def kolmogorov(sample):
    sample = sample.flatten().double().sort().values
    places = torch.arange(1, len(sample) + 1, dtype=torch.float64) / len(sample)
    return float((sample - places).abs().max()) * math.sqrt(len(sample))


@pytest.mark.parametrize("purpose", Stream)
@pytest.mark.parametrize("shape", [(), (3, 4)])
def test_numbers_are_uniform(purpose, shape):
    numbers = draw().uniform(purpose, shape)
    assert numbers.shape == (COUNT, *shape)
    assert numbers.dtype == torch.float32
    assert numbers.min() > 0
    assert numbers.max() < 1
    assert kolmogorov(numbers) < 1.8
    share = torch.histc(numbers, bins=64, min=0, max=1) / numbers.numel()
    assert (share - 1 / 64).abs().max() < 4.5 / math.sqrt(64 * numbers.numel())


def test_every_bit_is_fair():
    numbers = (draw().uniform(Stream.START, (25,)).double() * 2**23).long().flatten()
    for bit in range(23):
        share = float((numbers >> bit & 1).double().mean())
        assert abs(share - 0.5) < 4 * 0.5 / math.sqrt(len(numbers))


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, 2**40 + 3, 2**63, 2**64 - 1, -1])
def test_numbers_of_any_seed_are_uniform(seed):
    numbers = draw(seed).uniform(Stream.START, (5,))
    assert kolmogorov(numbers) < 1.8
    assert torch.equal(numbers, draw(seed).uniform(Stream.START, (5,)))


@pytest.mark.slow
def test_the_ends_are_never_reached():
    """Half of the smallest step away from 0 and 1: what a logarithm or an inverse error function needs."""
    numbers = draw(index=torch.arange(200_000)).uniform(Stream.START, (20,))
    assert numbers.min() >= 2.0**-24
    assert numbers.max() <= 1 - 2.0**-24
    assert torch.isfinite(draw().normal(Stream.START, (20,))).all()


def test_purposes_know_nothing_of_each_other():
    numbers = {purpose: draw().uniform(purpose, (5,)) for purpose in Stream}
    for first, second in itertools.combinations(Stream, 2):
        assert correlation(numbers[first], numbers[second]) < 4.5


def test_epochs_know_nothing_of_each_other():
    numbers = [draw(epoch=epoch).uniform(Stream.START, (5,)) for epoch in (0, 1, 2, 29, 30, 1000)]
    for first, second in itertools.combinations(numbers, 2):
        assert correlation(first, second) < 4.5


@pytest.mark.parametrize("other", [1, 2, 2**31, 2**32, 2**33, 2**40, 2**63])
def test_seeds_know_nothing_of_each_other(other):
    """Also those that agree in their lower 32 bits."""
    assert correlation(draw(0).uniform(Stream.START, (5,)), draw(other).uniform(Stream.START, (5,))) < 4.5
    assert correlation(draw(7).uniform(Stream.START, (5,)), draw(7 + other).uniform(Stream.START, (5,))) < 4.5


@pytest.mark.parametrize("distance", [1, 2, 3, 16, 128, 1000])
def test_examples_know_nothing_of_each_other(distance):
    numbers = draw().uniform(Stream.START, (5,))
    assert correlation(numbers[:-distance], numbers[distance:]) < 4.5


def test_positions_know_nothing_of_each_other():
    numbers = draw().uniform(Stream.START, (40,))
    between = torch.corrcoef(numbers.T.double()) - torch.eye(40)
    assert between.abs().max() * math.sqrt(COUNT) < 4.5
    flat = numbers.flatten()
    for distance in (1, 2, 39, 40, 41):
        assert correlation(flat[:-distance], flat[distance:]) < 4.5


def test_squares_know_nothing_of_each_other():
    """Nor do their distances from the middle, where a weak hash is symmetric."""
    numbers = (draw().uniform(Stream.START, (20,)) - 0.5).square()
    between = torch.corrcoef(numbers.T.double()) - torch.eye(20)
    assert between.abs().max() * math.sqrt(COUNT) < 4.5
    assert correlation(numbers[:-1], numbers[1:]) < 4.5


def test_no_two_examples_get_the_same_noise():
    numbers = draw(index=torch.arange(50_000)).uniform(Stream.START, (4,))
    assert len(numbers.unique(dim=0)) == 50_000


def test_numbers_do_not_depend_on_the_batch():
    whole = draw(seed=5, epoch=3).uniform(Stream.RESET, (2, 3))
    for index in ([17], [3999, 0, 17], list(range(100, 60, -1))):
        assert torch.equal(draw(seed=5, epoch=3, index=index).uniform(Stream.RESET, (2, 3)), whole[index])


def test_numbers_do_not_depend_on_the_integer_type():
    """Indices may arrive as int32, from numpy for example."""
    expected = draw(seed=5, epoch=3, index=[0, 9, 40_000]).uniform(Stream.START, (4,))
    for dtype in (torch.int32, torch.int64):
        index = torch.tensor([0, 9, 40_000], dtype=dtype)
        found = CounterRNG(5, torch.tensor(3), index).uniform(Stream.START, (4,))
        assert torch.equal(found, expected)


def test_the_shape_is_only_a_shape():
    """Positions are counted in row-major order."""
    assert torch.equal(draw().uniform(Stream.START, (2, 3, 4)).flatten(1), draw().uniform(Stream.START, (24,)))
    assert torch.equal(draw().uniform(Stream.START, (1,))[:, 0], draw().uniform(Stream.START))


def test_normal_numbers_are_normal():
    numbers = draw().normal(Stream.START, (10,))
    assert numbers.shape == (COUNT, 10)
    below = 0.5 * (1 + torch.erf(numbers.double() / math.sqrt(2)))
    assert kolmogorov(below) < 1.8
    assert float(numbers.mean()) == pytest.approx(0, abs=4 / math.sqrt(numbers.numel()))
    assert float(numbers.var()) == pytest.approx(1, abs=6 / math.sqrt(numbers.numel()))


def test_purposes_are_numbered_apart():
    assert len({int(purpose) for purpose in Stream}) == len(list(Stream))


# A change of these values changes every run that somebody wants to repeat.
GOLDEN = {
    (0, 0, Stream.TOP): [4381657, 177630, 494970, 2897743],
    (0, 3, Stream.START): [1354954, 381784, 5304039, 4377433],
    (1, 9, Stream.RESET): [225261, 2653802, 3329702, 330638],
    (2**32 + 1, 9, Stream.RESET): [4632144, 6232458, 4028960, 3098253],
    (2**40 + 123456789, 29, Stream.RADIUS): [1088658, 4715442, 1121667, 7031578],
}


@pytest.mark.parametrize(("key", "words"), GOLDEN.items())
def test_the_numbers_are_these_for_ever(key, words):
    """As multiples of 2**-23, of examples 0 and 49999 at two positions."""
    seed, epoch, purpose = key
    numbers = draw(seed, epoch, [0, 49_999]).uniform(purpose, (2,)).double()
    assert (numbers * 2**23 - 0.5).flatten().tolist() == words


def test_the_seeds_of_generators_are_these_for_ever():
    assert [generator_seed(0, 0, Stream.ORDER), generator_seed(7, 29, Stream.ORDER)] == [3096160893, 2046380460]


def test_seeds_of_generators_differ():
    """By seed, also above 32 bits, by epoch and by purpose; each fits a generator."""
    keys = itertools.product((0, 1, 2**32, 2**32 + 1, 2**40), range(30), (Stream.ORDER, Stream.PROBE))
    seeds = [generator_seed(*key) for key in keys]
    assert len(set(seeds)) == len(seeds)
    for seed in seeds[:3]:
        torch.Generator().manual_seed(seed)
