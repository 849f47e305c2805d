"""Paths and amounts in sentences."""

import shlex

import pytest

from atas._utils.formatting import format_bytes, shell_quote


@pytest.mark.parametrize("path", ["runs/a", "runs/mein Lauf ä", "runs/it's", "$HOME/x"])
def test_a_path_in_a_command_is_one_word(path):
    assert shlex.split(f"atas evaluate {shell_quote(path)}") == ["atas", "evaluate", path]


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 kB"), (999_499, "999 kB"), (1.5e6, "1.5 MB"), (5.4e9, "5.4 GB"), (2.8e12, "2,800 GB")]
)
def test_amounts_of_bytes(size, text):
    assert format_bytes(size) == text
