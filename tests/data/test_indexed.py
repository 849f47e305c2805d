from __future__ import annotations

import pickle

import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from atas import data
from atas.errors import DataError

PAIRS = TensorDataset(torch.arange(10.0).reshape(10, 1), torch.arange(10) % 3)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_in_a_shuffled_loader(workers):
    loader = DataLoader(data.indexed(PAIRS), batch_size=4, shuffle=True, num_workers=workers)
    x, y, index = (torch.cat(parts) for parts in zip(*loader, strict=True))
    assert sorted(index.tolist()) == list(range(10))
    assert torch.equal(x[:, 0].long(), index)
    assert torch.equal(y, index % 3)


def test_survives_pickling():
    again = pickle.loads(pickle.dumps(data.indexed([("a", 0), ("b", 1)])))
    assert list(again) == [("a", 0, 0), ("b", 1, 1)]
    assert len(again) == 2


def test_a_subset_counts_from_zero():
    assert [index for _, _, index in data.indexed(Subset(PAIRS, [7, 3]))] == [0, 1]


def test_negative_positions_give_the_same_index():
    assert data.indexed([("a", 0), ("b", 1)])[-1] == ("b", 1, 1)


def test_a_split_can_be_wrapped():
    digits = data.load("digits")
    x, y, index = data.indexed(digits.test)[5]
    assert torch.equal(x, digits.test[5][0])
    assert (y, index) == (digits.test[5][1], 5)


@pytest.mark.parametrize(
    ("item", "found"), [((1, 2, 3), "3 entries"), (5, "int"), ({"x": 1, "y": 2}, "dict"), ("ab", "str")]
)
def test_items_must_be_pairs(item, found):
    with pytest.raises(DataError, match=rf"item 0 of the dataset is {found}, expected a pair"):
        data.indexed([item])[0]


def test_streams_are_refused():
    with pytest.raises(DataError, match="map-style"):
        data.indexed(iter([(1, 2)]))
