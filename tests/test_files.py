"""Writing files as a whole, and what is said where that fails."""

import doctest
import shlex

import pytest

from atas import _files
from atas._files import in_bytes, in_shell, write_text


def test_examples_in_docstrings_run():
    result = doctest.testmod(_files)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("path", ["runs/a", "runs/mein Lauf ä", "runs/it's", "$HOME/x"])
def test_a_path_in_a_command_is_one_word(path):
    assert shlex.split(f"atas evaluate {in_shell(path)}") == ["atas", "evaluate", path]


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 kB"), (999_499, "999 kB"), (1.5e6, "1.5 MB"), (5.4e9, "5.4 GB"), (2.8e12, "2,800 GB")]
)
def test_amounts_of_bytes(size, text):
    assert in_bytes(size) == text


def test_an_error_names_the_file_that_was_asked_for(tmp_path):
    """Nobody knows the temporary name."""
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder" / "none" / "result.json", tmp_path / "folder"):
        with pytest.raises(OSError, match=r"\[Errno") as caught:
            write_text(path, "text")
        assert caught.value.filename == str(path)
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]
