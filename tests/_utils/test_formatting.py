"""Paths and amounts in sentences."""

import re
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atas._utils.formatting import format_bytes, markdown_text, shell_quote


@pytest.mark.parametrize("path", ["runs/a", "runs/mein Lauf ä", "runs/it's", "$HOME/x"])
def test_a_path_in_a_command_is_one_word(path):
    assert shlex.split(f"atas evaluate {shell_quote(path)}") == ["atas", "evaluate", path]


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 kB"), (999_499, "999 kB"), (1.5e6, "1.5 MB"), (5.4e9, "5.4 GB"), (2.8e12, "2,800 GB")]
)
def test_amounts_of_bytes(size, text):
    assert format_bytes(size) == text


@pytest.mark.parametrize(
    "text", ["a](http://b", "a]]]((b", "a]`(b", "a]<(b", "!`[a](b)", "]![a]|(b", "![a][b]", "a\n# b\n[c]: d"]
)
def test_text_in_markdown_is_no_link(text):
    safe = markdown_text(text)
    assert not re.search(r"\]\(|\]\[|!\[|[`<>|\n]", safe), safe


@given(st.text(alphabet="]![(`<>|a\n\x1b\u202e "))
def test_any_text_in_markdown(text):
    safe = markdown_text(text)
    assert not re.search(r"\](?=[(\[])|!(?=\[)|[`<>|\n\x1b\u202e]", safe), (text, safe)
