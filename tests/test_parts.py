"""Parts of a training set: every example has one owner, and global batches do not depend on who owns what."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atas.noise import Purpose, seed_for
from atas.parts import Part


@st.composite
def layouts(draw):
    """Examples, shards and processes, of which each has a shard."""
    shards = draw(st.integers(1, 12))
    return draw(st.integers(shards, 200)), shards, draw(st.integers(1, shards))


def parts_of(examples, shards, processes):
    return [Part.of(examples, shards, process, processes) for process in range(processes)]


@given(layouts())
def test_every_example_has_one_owner(layout):
    examples, shards, _ = layout
    parts = parts_of(*layout)
    assert sum(part.held for part in parts) == shards
    assert max(part.held for part in parts) - min(part.held for part in parts) <= 1
    owned = [part.numbers(torch.arange(len(part))).tolist() for part in parts]
    assert sorted(number for numbers in owned for number in numbers) == list(range(examples))
    for part, numbers in zip(parts, owned, strict=True):
        assert numbers == [n for n in range(examples) if part.first <= n % shards < part.first + part.held]


@given(layouts(), st.integers(1, 4), st.integers(0, 3))
def test_global_batches_do_not_depend_on_the_processes(layout, rows, epoch):
    examples, shards, _ = layout
    size = rows * shards
    whole = Part(examples, shards, 0, shards).order(7, epoch)
    assert sorted(whole.tolist()) == list(range(examples))
    parts = parts_of(*layout)
    orders = [part.numbers(part.order(7, epoch)).split(part.share(size)) for part in parts]
    for number, batch in enumerate(whole.split(size)):
        shares = [order[number].tolist() if number < len(order) else [] for order in orders]
        assert sorted(batch.tolist()) == sorted(example for share in shares for example in share)
        assert [len(share) for share in shares] == [part.share(len(batch)) for part in parts]
        of_shard = torch.bincount(batch % shards, minlength=shards)
        assert of_shard.max() - of_shard.min() <= 1


def test_one_shard_has_the_order_of_one_generator():
    generator = torch.Generator().manual_seed(seed_for(3, 5, Purpose.ORDER))
    assert torch.equal(Part(50).order(3, 5), torch.randperm(50, generator=generator))


def test_shards_have_orders_of_their_own():
    dealt = Part(400, 4, 0, 4).order(0, 0)
    orders = [tuple((dealt[shard::4] // 4).tolist()) for shard in range(4)]
    assert len(set(orders)) == 4


def test_a_whole_changes_no_number():
    rows = torch.arange(10)
    assert Part(10).numbers(rows) is rows
    assert Part(10, 5, 0, 5).numbers(rows) is rows


@pytest.mark.parametrize("method", ["atas", "atta", "fgsm-rs"])
def test_noise_belongs_to_the_example(method):
    """A method with a part of the examples draws for them what one with all of them draws."""
    import atas

    whole = atas.methods.create(method, atas.Linf(0.1), 11, (1, 4, 4))
    part = Part.of(11, 4, 1, 3)
    some = atas.methods.create(method, atas.Linf(0.1), len(part), (1, 4, 4))
    some.own(part)
    rows = torch.arange(len(part))
    for one in (whole, some):
        one.start_epoch(4, epochs=30)
    drawn = whole.draw(part.numbers(rows)).uniform(Purpose.START, (3,))
    assert torch.equal(some.draw(rows).uniform(Purpose.START, (3,)), drawn)
    if method != "fgsm-rs":
        assert torch.equal(some.memory.delta, whole.memory.delta[part.numbers(rows)])
        for one in (whole, some):
            one.memory.reset(0, epoch=9)
        assert torch.equal(some.memory.delta, whole.memory.delta[part.numbers(rows)])
