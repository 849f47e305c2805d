"""JSON and TOML of any content: values of the promised type, or a few words that say what is wrong."""

import os
from typing import Any, Literal, NotRequired, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atas._utils import documents
from atas._utils.documents import MalformedError, conform, parse_json, parse_toml, read_json


class Required(TypedDict):
    name: str


class Row(Required, total=False):
    size: int | None
    shape: tuple[int, int]


class Declared(TypedDict):
    name: "str"
    size: "NotRequired[int]"  # a text, as all annotations are after `from __future__ import annotations`


DEEP = 100_000


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\xff{}", "not JSON"),
        (b"{", "not JSON"),
        (b"", "not JSON"),
        (b"1" * 5000, "not JSON"),
        (b"[" * DEEP, "nested too deeply"),
        (b'{"a":' * DEEP, "nested too deeply"),
    ],
)
def test_content_that_is_no_json(content, why):
    with pytest.raises(MalformedError, match=why):
        parse_json(content)


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"\xff", "byte 0 is not UTF-8"), (b"a = ", "Invalid value"), (b"a = " + b"[" * DEEP, "nested too deeply")],
)
def test_content_that_is_no_toml(content, why):
    with pytest.raises(MalformedError, match=why):
        parse_toml(content)


@pytest.mark.parametrize(
    ("value", "kind", "why"),
    [
        (True, int, "it is True, not a whole number"),
        (True, float, "it is True, not a number"),
        (1.5, int, "it is 1.5, not a whole number"),
        (10**400, float, r"it is 10+\.\.\., not a number"),
        ("x" * 100, bool, r"it is .x+\.\.\., not true or false"),
        ([1, "2"], list[float], r"\[1\] is '2', not a number"),
        ({"a": {"b": None}}, dict[str, dict[str, str]], r"a\.b is None, not a text"),
        ([], dict[str, Any], "it is a list, not an object"),
        ("c", Literal["a", "b"], "it is 'c', not 'a' or 'b'"),
        ({}, Row, "'name' is missing"),
        ({"name": "n", "size": "1"}, Row, "size is '1', not a whole number"),
        ({"name": "n", "shape": [1, 2, 3]}, Row, r"shape is a list, not a list of 2"),
        ({"name": "n", "shape": [1, None]}, Row, r"shape\[1\] is None, not a whole number"),
        ({"line\nbreak" * 50: 1}, dict[str, str], r"'line\\nbreak"),
    ],
)
def test_a_value_of_another_type(value, kind, why):
    with pytest.raises(MalformedError, match=why) as caught:
        conform(value, kind)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_values_of_the_promised_type():
    for row in ({"name": "n"}, {"name": "n", "size": None, "shape": [3, 4], "more": object}):
        assert conform(row, Row) is row
    assert conform(1, float) == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(JSON, st.sampled_from([int, float, bool, str, list[int], dict[str, float], Row, int | None, tuple[int, str]]))
@pytest.mark.slow
def test_any_value_and_type(value, kind):
    """Accepted as it is, or refused with a sentence."""
    try:
        assert conform(value, kind) is value
    except MalformedError as error:
        why = str(error)
    else:
        why = ""
    assert why.isprintable()


@pytest.mark.parametrize("name", ["/dev/zero", "fifo", "folder"])
def test_only_regular_files_are_read(name, tmp_path):
    path = tmp_path / "result.json"
    if name == "fifo":
        os.mkfifo(path)  # opening it would wait for ever
    elif name == "folder":
        path.mkdir()
    else:
        path.symlink_to(name)
    with pytest.raises(OSError, match="it is not a regular file"):
        read_json(path, dict[str, Any])


def test_a_file_of_absurd_size_is_not_read(tmp_path):
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate(documents.MAX_BYTES + 1)
    with pytest.raises(MalformedError, match="larger than 256 MiB"):
        read_json(path, dict[str, Any])


def test_a_key_that_is_not_required_may_be_missing():
    assert conform({"name": "a"}, Declared) == {"name": "a"}
    with pytest.raises(MalformedError, match=r"^'name' is missing$"):
        conform({"size": 1}, Declared)
    with pytest.raises(MalformedError, match=r"^size is '1', not a whole number$"):
        conform({"name": "a", "size": "1"}, Declared)
