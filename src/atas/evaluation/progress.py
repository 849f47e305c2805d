"""The progress of an evaluation: the work left, and its display."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from rich.console import Console

from atas._utils.console import ProgressDisplay
from atas._utils.formatting import format_duration
from atas.evaluation.warnings import EvaluationWarning

StageKey = tuple[int, str, int]  # chunk, attack, stage


@dataclass(frozen=True)
class Status:
    """The state of an evaluation, as passed to the callback `progress`."""

    attack: str
    """The running attack, by the name under which it was requested."""
    stage: str
    """Its stage, or the attack itself if it has no stages."""
    num_correct: int
    """Examples of this chunk that are not broken so far."""
    examples: int
    """Examples of this chunk."""
    done: float
    """Fraction of the work that is done, from 0 to 1. The total work shrinks when examples break."""
    seconds_left: float | None
    """The maximum time left at the current rate; None before the first measurement."""
    note: str | None = None
    """A sentence to show."""
    warning: EvaluationWarning | None = None
    """The warning that the note quotes. The result lists all warnings again."""


StatusCallback = Callable[[Status], None]


class ProgressMeter:
    """Measures work in forward passes: done by this process, done before a stop, and the maximum that is left."""

    def __init__(self, callback: StatusCallback | None) -> None:
        self._callback = callback
        self._left: dict[StageKey, float] = {}
        self._made = self._before = 0.0
        self._began: float | None = None
        self._last = Status("", "", 0, 0, 0.0, None)

    def set_remaining(self, key: StageKey, work: float) -> None:
        """Set the maximum work that is left of a stage. The first call starts the clock."""
        if self._began is None:
            self._began = time.monotonic()
        self._left[key] = work

    def resumed(self, work: float) -> None:
        """Add work that was done before a stop."""
        self._before += work

    def completed(self, work: float) -> None:
        """Add work that this process has done."""
        self._made += work

    def update(self, attack: str, stage: str, num_correct: int, examples: int) -> None:
        """Pass the current status to the callback."""
        left = sum(self._left.values())
        done = self._made + self._before
        seconds = None
        if self._made and self._began is not None:
            seconds = (time.monotonic() - self._began) / self._made * left
        self._last = Status(attack, stage, num_correct, examples, done / max(done + left, 1), seconds)
        if self._callback is not None:
            self._callback(self._last)

    def notify(self, sentence: str) -> None:
        """Pass a sentence to the callback."""
        if self._callback is not None:
            self._callback(replace(self._last, note=sentence))

    def warn(self, warning: EvaluationWarning) -> None:
        """Pass a warning to the callback."""
        if self._callback is not None:
            self._callback(replace(self._last, note=f"warning: {warning}", warning=warning))


class EvaluationProgress(ProgressDisplay):
    """Shows the status of an evaluation: a bar in a terminal, one line in a notebook, a line now and then elsewhere.

    A callback for `evaluate(progress=...)`. It writes to standard error; a bar is removed at the end of the `with`.

    >>> with EvaluationProgress() as progress:
    ...     result = evaluate(model, x, y, threat, progress=progress)  # doctest: +SKIP
    """

    refresh_interval = 0.2

    def __init__(
        self,
        *,
        quiet: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(console or Console(stderr=True, quiet=quiet), clock=clock)
        self.add_bar()
        self._title = ""
        self.shown_warnings: set[EvaluationWarning] = set()
        """Warnings that are on the screen already."""

    def __call__(self, status: Status) -> None:
        """Show a note at once, and the rest of the status if an update is due."""
        if status.note is not None:
            self._show_note(status.note, status.warning)
            return
        title = status.attack if status.stage == status.attack else f"{status.attack}: {status.stage}"
        is_new = self.bar is not None and title != self._title
        if not is_new and not self.due():
            return
        self._title = title
        text = f"{status.num_correct:,} of {status.examples:,} correct"
        if status.seconds_left is not None:
            text += f", at most {format_duration(status.seconds_left)} left"
        plain = f"{title}  {100 * status.done:.0f}%  {text}"
        self.show("evaluating", plain, description=title, completed=status.done, total=1.0, text=text)

    def _show_note(self, note: str, warning: EvaluationWarning | None) -> None:
        """Show a note. Without a terminal, leave warnings to the result, which lists them."""
        if warning is None:
            self.log(note)
        elif self.bar is not None:
            self.log(note)
            self.shown_warnings.add(warning)
