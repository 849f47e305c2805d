"""Writing files as a whole, and what is said where that fails."""

import errno
import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from atas._utils.files import file_lock, remove_temporaries, write_atomically, write_text
from atas.errors import AtasError


def test_an_error_names_the_file_that_was_asked_for(tmp_path):
    """Nobody knows the temporary name."""
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder" / "none" / "result.json", tmp_path / "folder"):
        with pytest.raises(OSError, match=r"\[Errno") as caught:
            write_text(path, "text")
        assert caught.value.filename == str(path)
    assert [path.name for path in tmp_path.rglob("*")] == ["folder"]


def test_a_folder_is_no_file():
    with pytest.raises(IsADirectoryError):
        write_text(Path(), "text")


@pytest.mark.parametrize("named", [False, True], ids=["full disk", "read-only"])
def test_write_atomically_raises_the_error_of_the_write_if_cleaning_up_fails_too(named, tmp_path, monkeypatch):
    path = tmp_path / "result.json"

    def write(temporary):
        raise OSError(30, "Read-only file system", str(temporary)) if named else OSError(28, "No space left on device")

    def unlink(temporary, missing_ok=False):
        raise OSError(30, "Read-only file system", str(temporary))

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(OSError, match="Read-only" if named else "No space") as caught:
        write_atomically(path, write)
    assert caught.value.filename == str(path)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_permissions_follow_the_umask(umask, mode, tmp_path, monkeypatch):
    """The umask of the process is never changed, not even for a moment: other threads create files too."""
    before = os.umask(umask)
    try:
        monkeypatch.setattr(os, "umask", lambda _: pytest.fail("the umask was changed"))
        write_text(tmp_path / "text", "text")
        write_atomically(tmp_path / "tensors", lambda path: save_file({"x": torch.zeros(2)}, path))
    finally:
        monkeypatch.undo()
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("text", "tensors")] == [mode, mode]


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


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from atas._utils import files

def write(temporary):
    temporary.write_bytes(b"half")
    (temporary.parent / ".tmpAb3dE9").write_bytes(b"of a library")
    os.kill(os.getpid(), signal.SIGKILL)

files.write_atomically(Path(sys.argv[1]), write)
"""


@pytest.mark.slow
def test_what_a_killed_process_left_is_removed_by_the_next_write(tmp_path):
    """Also what a library put beside its file, and what earlier versions left; nothing else."""
    path = tmp_path / "model.safetensors"
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert done.returncode == -9
    assert [file.name for file in tmp_path.rglob("*") if file.is_file()], "something is left"
    (tmp_path / f".{path.name}.4711.tmp").write_text("of an earlier version")
    own = [".notes.tmp", ".other.safetensors.0a1b2c3d.tmp", f".{path.name}.mine.tmp", f"{path.name}.1.tmp"]
    for name in own:
        (tmp_path / name).write_text("mine")
    write_text(path, "text")
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([path.name, *own])


def test_what_another_process_writes_is_left_alone(tmp_path):
    path = tmp_path / "result.json"

    def write(temporary):
        temporary.write_text("first")
        remove_temporaries(path)
        write_text(path, "second")

    write_atomically(path, write)
    assert path.read_text() == "first"
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


WRITER = """
import sys
from pathlib import Path
from atas._utils.files import write_text

for number in range(400):
    write_text(Path(sys.argv[1]), str(number))
"""


@pytest.mark.slow
def test_several_processes_write_the_same_file(tmp_path):
    """As those do that work on one plan: none takes the new folder of another for one that was left."""
    path = tmp_path / "study.md"
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(path)]) for _ in range(3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert [file.name for file in tmp_path.iterdir()] == ["study.md"]
    assert path.read_text() == "399"


def test_a_folder_that_was_removed_before_it_was_locked_is_made_again(tmp_path, monkeypatch):
    """Without a chance for the race above."""
    path, make, made = tmp_path / "result.json", Path.mkdir, []

    def mkdir(folder, *arguments, **options):
        make(folder, *arguments, **options)
        made.append(folder)
        if len(made) == 1:
            remove_temporaries(path)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    write_text(path, "text")
    assert len(made) == 2
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_files_are_written_on_a_disk_without_locks(number, tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    path = tmp_path / "result.json"

    def write(temporary):
        remove_temporaries(path)  # by another process, which cannot know whether the folder is in use
        temporary.write_text("text")

    with file_lock(tmp_path / ".lock", "taken"):
        write_atomically(path, write)
    assert path.read_text() == "text"
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]


def test_a_lock_is_held_by_one_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("atas._utils.files.LOCK_TIMEOUT", 0.0)
    lock = tmp_path / "new" / ".lock"
    with file_lock(lock, "taken"):
        with pytest.raises(AtasError, match="taken"), file_lock(lock, "taken"):
            pass
        assert lock.exists()
    assert not lock.exists()


@pytest.mark.slow
def test_of_many_only_one_at_a_time_holds_a_lock(tmp_path):
    """Although each removes the file at its end."""
    lock, inside, most, turns = tmp_path / ".lock", [], [], []

    def work():
        for _ in range(30):
            with file_lock(lock, "taken"):
                inside.append(1)
                most.append(len(inside))
                time.sleep(0.0001)
                inside.pop()
            turns.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1
    assert len(turns) > 30


def test_a_full_disk_is_told_by_safetensors_in_words_only(tmp_path):
    def write(_):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with pytest.raises(OSError, match="No space left on device") as error:
        write_atomically(tmp_path / "x", write)
    assert (error.value.errno, error.value.filename) == (errno.ENOSPC, str(tmp_path / "x"))
