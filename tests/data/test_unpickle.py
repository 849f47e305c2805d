from __future__ import annotations

import collections
import contextlib
import datetime
import functools
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atas.data.restricted_pickle import loads_dict


@pytest.mark.parametrize("protocol", range(6))
def test_plain_content_comes_back(protocol):
    content = {
        "numbers": [1, -(2**40), 2.5, True, None],
        "text": ("ä", b"\x00\xff"),
        "inside": {"a": [{}]},
        "bytes": np.arange(12, dtype=np.uint8).reshape(3, 4),
        "floats": np.asfortranarray(np.linspace(0, 1, 6, dtype=">f8").reshape(2, 3)),
        "integers": np.array([-1, 2], np.int16),
    }
    back = loads_dict(pickle.dumps(content, protocol))
    assert back.keys() == content.keys()
    for key, value in content.items():
        if isinstance(value, np.ndarray):
            assert back[key].dtype == value.dtype
            assert np.array_equal(back[key], value)
        else:
            assert back[key] == value


class Reduced:
    """Pickles to a call."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Reduced(eval, ("1",)), "eval"),
        (Reduced(getattr, ("", "join")), "getattr"),
        (Reduced(bytes, (3,)), "bytes"),
        (Reduced(np.fromfile, ("x",)), "fromfile"),
        (Reduced(np.load, ("x",)), "load"),
        (functools.partial(print), "functools.partial"),
        (collections.OrderedDict(), "collections.OrderedDict"),
        (datetime.date(2020, 1, 1), "datetime.date"),
        (np.float64(1), "scalar"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_everything_else_is_named_and_refused(value, named, protocol):
    with pytest.raises(pickle.UnpicklingError, match=rf"tries to load .*{named}"):
        loads_dict(pickle.dumps({"data": value}, protocol))


def test_dotted_names_do_not_lead_further():
    raw = b"\x80\x04}(\x8c\x01a\x8c\x05numpy\x8c\x0cndarray.dump\x93u."
    with pytest.raises(pickle.UnpicklingError, match=r"numpy\.ndarray\.dump"):
        loads_dict(raw)


@pytest.mark.parametrize("array", [np.array([{}], object), np.array(["a"]), np.zeros(2, [("a", "u1")])])
def test_arrays_hold_numbers_only(array):
    with pytest.raises(pickle.UnpicklingError, match="array of type"):
        loads_dict(pickle.dumps({"data": array}, 4))


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"no pickle at all",
        pickle.dumps([1, 2]),
        pickle.dumps({"data": np.zeros(5)})[:-20],
        # an array that never gets its content
        b"\x80\x02}U\x04datacnumpy.core.multiarray\n_reconstruct\n)Rs.",
        # an array that claims a larger shape than it has bytes for
        b"\x80\x02}U\x04datacnumpy.core.multiarray\n_reconstruct\n)R(K\x01M\xff\xff\x85cnumpy\ndtype\nU\x02u1\x85R\x89U\x01xtbs.",
    ],
    ids=["empty", "text", "list", "cut", "unfilled", "shape"],
)
def test_damage_is_one_kind_of_error(raw):
    with pytest.raises(pickle.UnpicklingError):
        loads_dict(raw)


@pytest.mark.parametrize(
    "stand_in",
    [
        b"cnumpy.core.multiarray\n_reconstruct\n",
        b"cnumpy.core.numeric\n_frombuffer\n",
        b"cnumpy\ndtype\n",
        b"c_codecs\nencode\n",
    ],
)
def test_a_pickle_cannot_change_the_reader(stand_in):
    # The BUILD opcode with a pair sets attributes on whatever is on the stack.
    marked = loads_dict(b"\x80\x02}U\x01a" + stand_in + b"N}U\x04markK\x01s\x86bs.")["a"]
    assert marked.mark == 1
    assert not hasattr(loads_dict(b"\x80\x02}U\x01a" + stand_in + b"s.")["a"], "mark")


@pytest.mark.parametrize(
    "raw",
    [
        b"\x80\x02}r\xff\xff\xff\x7f.",  # the memo would take 64 GB
        b"}p4294967295\n.",
        b"}p-1\n.",
        b"\x80\x05\x96\x00\x00\x00\x00\x00\x00\x00\x10.",  # a bytearray of 2^60 bytes
        b"\x80\x04\x8e\x00\x00\x00\x00\x00\x00\x00\x10.",
        b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x10}.",
        b"\x80\x02}U\x01a\x8b\xff\xff\xff\x7fs.",  # an integer of 2^31 bytes
        b"}I" + b"9" * 10_000 + b"\n.",
        b"(" * 100_000 + b"t" * 100_000 + b".",
        b"\x80\xff}.",
        b"P1\n.",  # an object of someone else's store
        b"\x82\x01.",  # of the registry of extensions
        b"}U\x04dataq\x00h\xffs.",
        b"}\x81.",
        b"}}b.",
    ],
)
def test_absurd_sizes_and_operations(raw):
    with pytest.raises(pickle.UnpicklingError):
        loads_dict(raw)


VALID = [
    pickle.dumps({"data": np.arange(6, dtype=np.uint8).reshape(2, 3), "labels": [1, 2], "x": (b"y", "z")}, protocol)
    for protocol in (0, 2, 4, 5)
]


@given(st.sampled_from(VALID), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6))
@settings(max_examples=300)
def test_random_damage_is_one_kind_of_error(raw, changes):
    damaged = bytearray(raw)
    for place, value in changes:
        damaged[place % len(damaged)] = value
    with contextlib.suppress(pickle.UnpicklingError):
        assert isinstance(loads_dict(bytes(damaged)), dict)
