"""Writing files as a whole, and what is said where that fails."""

import pytest

from atas._files import write_text


def test_an_error_names_the_file_that_was_asked_for(tmp_path):
    """Nobody knows the temporary name."""
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder" / "none" / "result.json", tmp_path / "folder"):
        with pytest.raises(OSError, match=r"\[Errno") as caught:
            write_text(path, "text")
        assert caught.value.filename == str(path)
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]
