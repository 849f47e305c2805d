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

_OFFSETS = 1 << 61  # of bytes in a file that a lock can name: trainings have the first so many, devices the next


class Locks:
    """The locks of this process; open within a `with`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Locks:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a+b")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()  # and with it all locks

    @contextmanager
    def try_lock(self, key: str) -> Iterator[bool]:
        """Whether what has this key, a hexadecimal number, is for this process: not if another one is at it."""
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
        """Work on a device for a while; what is given says whether another process does so too."""
        offset = _OFFSETS + int(hashlib.sha256(device.encode()).hexdigest(), 16) % _OFFSETS

        def is_shared() -> bool:
            """A lock that many share becomes one's own where nobody else has it; and then is shared again."""
            alone = self._try_exclusive(offset)
            fcntl.lockf(self._file, fcntl.LOCK_SH, 1, offset)
            return not alone

        fcntl.lockf(self._file, fcntl.LOCK_SH, 1, offset)
        try:
            yield is_shared
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, offset)

    def _try_exclusive(self, offset: int) -> bool:
        """Whether the exclusive lock of a byte could be had."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, offset)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            return False
        return True
