"""Ctrl-C, termination and a lost terminal: a request to stop, answered between two steps."""

from __future__ import annotations

import signal
import threading
from types import TracebackType

from atas.errors import AtasError


class Interrupted(AtasError):  # noqa: N818  (nothing went wrong)
    """A signal ended the run; everything is saved."""

    everywhere = True


class StopRequest:
    """While it is entered, a first signal sets `asked`; a second one does what it always did. But a terminal that goes
    away may send more than one, and where that is ignored already, as under nohup, it stays so.

    A `patient` one takes any number of signals, and where an error ends it goes on to do so until the process has said
    why: torchrun sends its processes what a terminal has sent them already, tells all to end as soon as one does, and
    ends them after half a minute where they do not by themselves.
    """

    def __init__(self, patient: bool = False) -> None:
        self.asked = False
        self._patient = patient
        self._found: dict[int, signal._HANDLER] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # elsewhere signals cannot be caught
            hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
            for number in (signal.SIGINT, signal.SIGTERM, *hangup):
                self._found[number] = signal.signal(number, self._ask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._patient and error is not None:
            return
        for number, handler in self._found.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _frame: object) -> None:
        self.asked = True
        if not self._patient and number != signal.SIGHUP:
            signal.signal(number, self._found[number])
