"""The progress of an evaluation: a live line in a terminal, plain lines elsewhere.

Everything goes to standard error, so that standard output holds only the result.
"""

from __future__ import annotations

import time

from rich.console import Console

from atas._utils.console import ProgressDisplay, progress_bar
from atas._utils.formatting import format_duration
from atas.evaluation import Status

_PLAIN_EVERY = 30.0  # seconds between lines, without a terminal
_REFRESH = 0.2
_STEPS = 1000


class EvaluationProgress(ProgressDisplay):
    """Shows each status of an evaluation, but not more often than anyone could read."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        console = console or Console(stderr=True, quiet=quiet)
        super().__init__(console, progress_bar(console))
        self._last = time.monotonic()
        self._shown = ""
        self.logged: set[str] = set()
        if self._progress is not None:
            self._task = self._progress.add_task("evaluating", total=_STEPS, text="")

    def __call__(self, status: Status) -> None:
        """Show it, if it is time."""
        if status.note is not None:
            self._pass_on(status.note)
            return
        what = status.attack if status.stage == status.attack else f"{status.attack}: {status.stage}"
        wait = _PLAIN_EVERY if self._progress is None else 0.0 if what != self._shown else _REFRESH
        if time.monotonic() - self._last < wait:
            return
        self._last, self._shown = time.monotonic(), what
        text = f"{status.num_correct:,} of {status.examples:,} hold"
        if status.seconds_left is not None:
            text += f", at most {format_duration(status.seconds_left)} left"
        if self._progress is not None:
            self._progress.update(self._task, description=what, completed=status.done * _STEPS, text=text)
        else:
            self.log(f"{what}  {100 * status.done:.0f}%  {text}")

    def _pass_on(self, sentence: str) -> None:
        """Warnings come with the result; who sits before the screen is to see them at once."""
        if self._progress is not None or not sentence.startswith("warning:"):
            self.log(sentence)
            self.logged.add(sentence)
