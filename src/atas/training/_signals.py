"""Ctrl-C and termination: a request to stop, answered between two steps."""

from __future__ import annotations

import signal
import threading
from types import TracebackType


class StopRequest:
    """While it is entered, a first signal sets `asked`; a second one does what it always did."""

    def __init__(self) -> None:
        self.asked = False
        self._found: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # elsewhere signals cannot be caught
            for number in (signal.SIGINT, signal.SIGTERM):
                self._found[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._found.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _frame: object) -> None:
        self.asked = True
        signal.signal(number, self._found[number])
