"""Write files atomically: a crash leaves either the old content or the new. Also checks of paths, and file locks."""

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
    """Raise UsageError if an option names a folder or a file with another ending, before the work begins."""
    if path.is_dir():
        such_as = f" such as result{endings[0]}" if endings else ""
        raise UsageError(f"{option} names a file, and {path} is a folder; add a file's name{such_as}")
    if endings and path.suffix.lower() not in endings:
        raise UsageError(f"{option} names a file that ends in {endings[0]}; got {path}")


def check_writable(path: Path) -> None:
    """Make the folder of a file and raise OSError if files cannot be created there, before the work begins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        error.filename = str(path)  # the user does not know the temporary name
        raise


def redirect_to_devnull(stream: IO[str]) -> None:
    """Discard what a closed stream still buffers and all that follows; flushing it at exit would fail."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, stream.fileno())
    os.close(devnull)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary path in the same folder, sync the file, and rename it to `path`."""
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    # Process ids are not unique among containers that share a disk.
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
        if error.errno is not None and error.filename in (None, str(temporary)):  # the user does not know that name
            error.filename = str(path)
        raise
    finally:
        with suppress(OSError):  # the file is renamed, or was never created
            temporary.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically. Names of files that are not UTF-8 are written with escapes."""
    write_atomically(path, lambda temporary: temporary.write_bytes(text.encode("utf-8", "backslashreplace")))


@contextmanager
def file_lock(lock: Path, sentence: str) -> Iterator[None]:
    """Hold an exclusive lock; raise AtasError with the sentence if another process holds it.

    The kernel releases the lock when the process ends. Workers of a killed process hold its lock a moment longer, so
    this waits up to LOCK_TIMEOUT.
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
    """Read a JSON object; return an empty dict if the file is missing or damaged. For optional information."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
