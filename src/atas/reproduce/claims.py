"""Which training is whose, among processes that share a folder of results, and who works side by side.

Each training is one byte of one file, locked by the process that is at it, and so is each device, by all that work on
it. A lock ends with its process, however that ends, so nothing has to be cleared up after a crash.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

_RANGE = 1 << 61  # of places in a file that a lock can name: trainings have the first so many, devices the next


class Claims:
    """The claims of this process; open within a `with`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Claims:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a+b")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()  # and with it all locks

    @contextmanager
    def claim(self, key: str) -> Iterator[bool]:
        """Whether what has this key, a hexadecimal number, is for this process: not if another one is at it."""
        place = int(key, 16) % _RANGE
        if not self._taken(place):
            yield False
            return
        try:
            yield True
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, place)

    @contextmanager
    def presence(self, device: str) -> Iterator[Callable[[], bool]]:
        """Work on a device for a while; what is given says whether another process does so too."""
        place = _RANGE + int(hashlib.sha256(device.encode()).hexdigest(), 16) % _RANGE

        def others() -> bool:
            """A lock that many share becomes one's own where nobody else has it; and then is shared again."""
            alone = self._taken(place)
            fcntl.lockf(self._file, fcntl.LOCK_SH, 1, place)
            return not alone

        fcntl.lockf(self._file, fcntl.LOCK_SH, 1, place)
        try:
            yield others
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, place)

    def _taken(self, place: int) -> bool:
        """Whether the lock of a place could be had."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            return False
        return True
