"""Writing files so that a crash at any moment leaves either the old content or the new, never a part."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from atas.errors import AtasError, UsageError

LOCK_TIMEOUT = 2.0  # seconds


def check_output_path(path: Path, option: str, *endings: str) -> None:
    """Refuse what an option cannot mean, before the work whose result goes there: a folder, and a file of another kind,
    which would be lost."""
    if path.is_dir():
        such_as = f" such as result{endings[0]}" if endings else ""
        raise UsageError(f"{option} names a file, and {path} is a folder; add a file's name{such_as}")
    if endings and path.suffix.lower() not in endings:
        raise UsageError(f"{option} names a file that ends in {endings[0]}; got {path}")


def check_writable(path: Path) -> None:
    """Make a file's folder, and see now that files can be made there, not when all is done."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        error.filename = str(path)  # nobody knows the other name
        raise


def redirect_to_devnull(stream: IO[str]) -> None:
    """Send what a lost stream still holds, and all that follows, nowhere; it would be an error at the end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file under a temporary name beside `path`, sync it, and rename it into place."""
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    # Not by the process's number, which another one in another container may have too.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.touch(exist_ok=False)  # the kernel applies the umask
        mode = temporary.stat().st_mode & 0o777
        write(temporary)
        temporary.chmod(mode)  # safetensors replaces the file by one that only its owner can read
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        if error.errno is not None and error.filename in (None, str(temporary)):  # nobody but us knows that name
            error.filename = str(path)
        raise
    finally:
        with suppress(OSError):  # where nothing could be written, there is nothing to remove
            temporary.unlink()


def write_text(path: Path, text: str) -> None:
    """Replace a text file as a whole."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


@contextmanager
def file_lock(lock: Path, sentence: str) -> Iterator[None]:
    """Keep other processes out, which are told the sentence; the lock ends with the process, however that ends.

    Workers of a process that was killed hold its lock for a moment longer, so an answer is not taken at the first word.
    """
    end = time.monotonic() + LOCK_TIMEOUT
    with lock.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= end:
                    raise AtasError(sentence) from error
                time.sleep(0.05)
        yield


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where the file is missing or damaged, for what is good to know but not needed."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
