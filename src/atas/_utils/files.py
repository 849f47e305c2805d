"""Write files atomically: a crash leaves either the old content or the new. Also checks of paths, and file locks."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from atas.errors import AtasError, UsageError

LOCK_TIMEOUT = 2.0  # seconds
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]+\.tmp", re.DOTALL)  # with the name of the file that is written
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)  # what such a disk answers
_LOCK = "lock"  # a file in a temporary folder


def check_output_path(path: Path, option: str, *endings: str) -> None:
    """Raise UsageError if an option names a folder or a file with another ending, before the work begins."""
    if path.is_dir():
        such_as = f" such as result{endings[0]}" if endings else ""
        raise UsageError(f"{option} names a file, and {path} is a folder; add a file's name{such_as}")
    if endings and path.suffix.lower() not in endings:
        raise UsageError(f"{option} names a file that ends in {' or '.join(endings)}; got {path}")


def check_json_path(path: Path, content: str) -> None:
    """Raise UsageError if JSON cannot be written there: to a folder, or in place of a file of another kind."""
    check_output_path(path, content)
    if path.suffix.lower() != ".json" and path.exists():
        with path.open("rb") as file:
            if file.read(1) not in (b"", b"{"):
                raise UsageError(f"{content} would replace {path}, which holds something else: give another name")


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
    """Call `write` with a temporary path, sync the file, and rename it to `path`.

    The temporary file is in a hidden folder beside `path`, with those that libraries make beside theirs. What a killed
    process left of an earlier write is removed first.
    """
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    remove_temporaries(path)
    try:
        with _temporary_folder(path) as folder:
            temporary = folder / f"{path.name}.tmp"
            temporary.touch(exist_ok=False)  # the kernel applies the umask
            mode = temporary.stat().st_mode & 0o777
            with _os_errors():
                write(temporary)
            temporary.chmod(mode)  # safetensors replaces the file by one that only its owner can read
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
            _sync_folder(path.parent)
    except OSError as error:
        named = Path(str(error.filename or "")).parts
        if error.errno is not None and (not named or any(map(_TEMPORARY.fullmatch, named))):
            error.filename = str(path)  # the user does not know the temporary name
        raise


@contextmanager
def _os_errors() -> Iterator[None]:
    """Raise OSError where a library in Rust, such as safetensors, has the system's error in its message only."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if (number := _OS_ERROR.search(str(error))) is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


@contextmanager
def _temporary_folder(path: Path) -> Iterator[Path]:
    """Create a folder beside a file, and remove it at the end; a lock tells other processes that it is in use."""
    lock = None
    while lock is None:
        # Process ids are not unique among containers that share a disk.
        folder = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        folder.mkdir()
        lock = _lock_new(folder)
    try:
        yield folder
    finally:
        lock.close()  # first: NFS keeps a file that is open, and with it the folder
        shutil.rmtree(folder, ignore_errors=True)


def _lock_new(folder: Path) -> IO[str] | None:
    """Lock a new folder; None if another process took it for one that a killed process left, and removed it."""
    try:
        lock = (folder / _LOCK).open("x")  # a file: on NFS, a lock on the folder would not reach other machines
    except FileNotFoundError:
        return None
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        locked = _is_at(lock, folder / _LOCK)
    except BlockingIOError:
        locked = False
    except OSError:  # a disk without locks, where nobody removes the folder of another process
        locked = True
    if locked:
        return lock
    lock.close()
    return None


def remove_temporaries(path: Path) -> None:
    """Remove what killed processes left of writes of this file, and nothing of other names."""
    remove_temporaries_in(path.parent, lambda name: name == path.name)


def remove_temporaries_in(folder: Path, is_written: Callable[[str], bool]) -> None:
    """Remove what killed processes left in a folder of writes of the files with such names, and nothing else."""
    with suppress(OSError):
        for name in os.listdir(folder):
            temporary = _TEMPORARY.fullmatch(name)
            if temporary and is_written(temporary[1]):
                _remove_temporary(folder / name)


def _remove_temporary(stale: Path) -> None:
    """Remove a temporary folder that nobody writes to, or a temporary file as earlier versions left them."""
    with suppress(OSError):
        if stale.is_symlink() or not stale.is_dir():
            stale.unlink()
            return
        with suppress(OSError):
            stale.rmdir()  # an empty folder may be new: its process notices, and makes another
            return
        if (stale / _LOCK).exists():  # else a kill left the rest: the lock is the first file in a folder
            with (stale / _LOCK).open("r+") as lock:  # on NFS, only a file that is open for writing can be locked
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (stale / _LOCK).unlink()
        shutil.rmtree(stale)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically. Names of files that are not UTF-8 are written with escapes."""
    write_atomically(path, lambda temporary: temporary.write_bytes(text.encode("utf-8", "backslashreplace")))


@contextmanager
def file_lock(lock: Path, sentence: str) -> Iterator[None]:
    """Hold an exclusive lock; raise AtasError with the sentence if another process holds it.

    The kernel releases the lock when the process ends. Workers of a killed process hold its lock a moment longer, so
    this waits up to LOCK_TIMEOUT. The file and its folder are created; the file is removed at the end. A disk without
    locks, such as Lustre mounted without them, is used without.
    """
    end = time.monotonic() + LOCK_TIMEOUT
    while (file := _try_lock(lock)) is None:
        if time.monotonic() >= end:
            raise AtasError(sentence)
        time.sleep(0.05)
    with file:
        try:
            yield
        finally:
            with suppress(OSError):
                lock.unlink()  # while the lock is held: a file that others could lock as well must not go


def _try_lock(lock: Path) -> IO[str] | None:
    """Lock a file and return it; None if another process holds the lock, or has just removed the file."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = lock.open("w")
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(file, lock):
            return file
    except BlockingIOError:
        pass
    except OSError as error:
        if error.errno in _WITHOUT_LOCKS:
            return file
        file.close()
        raise
    file.close()
    return None


def _is_at(file: IO[str], path: Path) -> bool:
    """Return whether an open file is the one that has this path now."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
