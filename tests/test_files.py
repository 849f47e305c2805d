"""Writing files as a whole, and what is said where that fails."""

import os

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


def test_a_file_is_on_the_disk_before_it_has_its_name_and_its_name_afterwards(tmp_path, monkeypatch):
    """A power cut leaves the old content or the new."""
    path, done = tmp_path / "result.json", []
    sync, replace = os.fsync, type(path).replace

    def synced(descriptor):
        done.append(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def renamed(file, target):
        done.append("renamed")
        return replace(file, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(type(path), "replace", renamed)
    write_text(path, "text")
    assert done == [path.stat().st_ino, "renamed", tmp_path.stat().st_ino]
