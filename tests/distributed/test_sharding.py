"""Parts of a training set: every example has one owner, and global batches do not depend on who owns what."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atas.core.rng import Stream, generator_seed
from atas.distributed.sharding import DataShard


@st.composite
def layouts(draw):
    """Examples, shards and processes, of which each has a shard."""
    shards = draw(st.integers(1, 12))
    return draw(st.integers(shards, 200)), shards, draw(st.integers(1, shards))


def parts_of(examples, shards, processes):
    return [DataShard.for_rank(examples, shards, process, processes) for process in range(processes)]


@given(layouts())
def test_every_example_has_one_owner(layout):
    examples, shards, _ = layout
    parts = parts_of(*layout)
    assert sum(part.num_held for part in parts) == shards
    assert max(part.num_held for part in parts) - min(part.num_held for part in parts) <= 1
    owned = [part.global_index(torch.arange(len(part))).tolist() for part in parts]
    assert sorted(number for numbers in owned for number in numbers) == list(range(examples))
    for part, numbers in zip(parts, owned, strict=True):
        assert numbers == [
            n for n in range(examples) if part.first_shard <= n % shards < part.first_shard + part.num_held
        ]


@given(layouts(), st.integers(1, 4), st.integers(0, 3))
def test_global_batches_do_not_depend_on_the_processes(layout, rows, epoch):
    examples, shards, _ = layout
    size = rows * shards
    whole = DataShard(examples, shards, 0, shards).order(7, epoch)
    assert sorted(whole.tolist()) == list(range(examples))
    parts = parts_of(*layout)
    orders = [part.global_index(part.order(7, epoch)).split(part.local_count(size)) for part in parts]
    for number, batch in enumerate(whole.split(size)):
        shares = [order[number].tolist() if number < len(order) else [] for order in orders]
        assert sorted(batch.tolist()) == sorted(example for share in shares for example in share)
        assert [len(share) for share in shares] == [part.local_count(len(batch)) for part in parts]
        of_shard = torch.bincount(batch % shards, minlength=shards)
        assert of_shard.max() - of_shard.min() <= 1


def test_one_shard_has_the_order_of_one_generator():
    generator = torch.Generator().manual_seed(generator_seed(3, 5, Stream.ORDER))
    assert torch.equal(DataShard(50).order(3, 5), torch.randperm(50, generator=generator))


def test_shards_have_orders_of_their_own():
    dealt = DataShard(400, 4, 0, 4).order(0, 0)
    orders = [tuple((dealt[shard::4] // 4).tolist()) for shard in range(4)]
    assert len(set(orders)) == 4


def test_a_whole_changes_no_number():
    rows = torch.arange(10)
    assert DataShard(10).global_index(rows) is rows
    assert DataShard(10, 5, 0, 5).global_index(rows) is rows


@pytest.mark.parametrize("method", ["atas", "atta", "fgsm-rs"])
def test_noise_belongs_to_the_example(method):
    """A method with a part of the examples draws for them what one with all of them draws."""
    import atas

    whole = atas.methods.create(method, atas.Linf(0.1), 11, (1, 4, 4))
    part = DataShard.for_rank(11, 4, 1, 3)
    some = atas.methods.create(method, atas.Linf(0.1), len(part), (1, 4, 4))
    some.set_shard(part)
    rows = torch.arange(len(part))
    for one in (whole, some):
        one.start_epoch(4, epochs=30)
    drawn = whole.rng(part.global_index(rows)).uniform(Stream.START, (3,))
    assert torch.equal(some.rng(rows).uniform(Stream.START, (3,)), drawn)
    if method != "fgsm-rs":
        assert torch.equal(some.memory.delta, whole.memory.delta[part.global_index(rows)])
        for one in (whole, some):
            one.start_epoch(9, epochs=30)  # resets the perturbations
        assert torch.equal(some.memory.delta, whole.memory.delta[part.global_index(rows)])
