"""Which training is whose, among processes that share a folder of results.

Each training is one byte of one file, locked by the process that is at it. A lock ends with its process, however that
ends, so nothing has to be cleared up after a crash.
"""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

_RANGE = 1 << 62  # of places in a file that a lock can name


class Claims:
    """The claims of this process; open within a `with`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Claims:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("ab")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()  # and with it all locks

    @contextmanager
    def claim(self, key: str) -> Iterator[bool]:
        """Whether what has this key, a hexadecimal number, is for this process: not if another one is at it."""
        place = int(key, 16) % _RANGE
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            yield False
            return
        try:
            yield True
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, place)
