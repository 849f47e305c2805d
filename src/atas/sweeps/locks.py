"""Locks for processes that share a results folder.

Each training and each device maps to one byte of a lock file: exclusive for trainings, shared for devices. The kernel
releases a lock when its process exits, so a crash leaves nothing to clean up. Closing any descriptor of the lock file
releases all locks of the process, so a process opens the file once at a time.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

_OFFSETS = 1 << 61  # bytes for trainings; devices have the next 2^61 bytes


class Locks:
    """The locks of this process, held inside a `with` block.

    POSIX drops all locks of a process when it closes any descriptor of the file. Do not open the file a second time
    while a `Locks` of this process is open.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Locks:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a+b")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()  # releases all locks

    @contextmanager
    def try_lock(self, key: str) -> Iterator[bool]:
        """Try to lock a hexadecimal key; the result is False if another process holds it."""
        offset = int(key, 16) % _OFFSETS
        if not self._try_exclusive(offset):
            yield False
            return
        try:
            yield True
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, offset)

    @contextmanager
    def device_in_use(self, device: str) -> Iterator[Callable[[], bool]]:
        """Mark a device as in use; the result is a function that returns whether another process uses it too."""
        offset = _OFFSETS + int(hashlib.sha256(device.encode()).hexdigest(), 16) % _OFFSETS

        def is_shared() -> bool:
            """Try to turn the shared lock into an exclusive one, then share it again."""
            alone = self._try_exclusive(offset)
            fcntl.lockf(self._file, fcntl.LOCK_SH, 1, offset)
            return not alone

        fcntl.lockf(self._file, fcntl.LOCK_SH, 1, offset)
        try:
            yield is_shared
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, offset)

    def _try_exclusive(self, offset: int) -> bool:
        """Return whether the exclusive lock of a byte was acquired."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            return False
        return True
