"""What a person sees of an evaluation under way: a live line in a terminal, plain lines elsewhere.

All of it goes to standard error, so that standard output holds the result alone.
"""

from __future__ import annotations

import time

from rich.console import Console

from atas._screen import Screen, bar, clock
from atas.evaluation import Status

_PLAIN_EVERY = 30.0  # seconds between lines, without a terminal
_REFRESH = 0.2
_STEPS = 1000


class Watch(Screen):
    """Shows each status of an evaluation, but not more often than anyone could read."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        console = console or Console(stderr=True, quiet=quiet)
        super().__init__(console, bar(console))
        self._last = time.monotonic()
        self._shown = ""
        self.said: set[str] = set()
        if self._progress is not None:
            self._task = self._progress.add_task("evaluating", total=_STEPS, text="")

    def __call__(self, status: Status) -> None:
        """Show it, if it is time."""
        if status.note is not None:
            self._pass_on(status.note)
            return
        what = status.attack if status.doing == status.attack else f"{status.attack}: {status.doing}"
        wait = _PLAIN_EVERY if self._progress is None else 0.0 if what != self._shown else _REFRESH
        if time.monotonic() - self._last < wait:
            return
        self._last, self._shown = time.monotonic(), what
        text = f"{status.right:,} of {status.examples:,} hold"
        if status.seconds_left is not None:
            text += f", at most {clock(status.seconds_left)} left"
        if self._progress is not None:
            self._progress.update(self._task, description=what, completed=status.done * _STEPS, text=text)
        else:
            self.say(f"{what}  {100 * status.done:.0f}%  {text}")

    def _pass_on(self, sentence: str) -> None:
        """Warnings come with the result; who sits before the screen is to see them at once."""
        if self._progress is not None or not sentence.startswith("warning:"):
            self.say(sentence)
            self.said.add(sentence)
