"""What a person sees of a plan under way: one line for the whole of it in a terminal, plain lines elsewhere.

All of it goes to standard error, so that standard output holds the result alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console

from atas._utils.console import ProgressDisplay
from atas._utils.formatting import format_duration
from atas.evaluation import Status
from atas.training import TrainingProgress


class PlanProgress(ProgressDisplay):
    """Work done and work left, over all trials of a plan."""

    def __init__(self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console or Console(stderr=True), clock=clock)
        self.add_bar()
        self._total = self._ahead = self._made = 0.0
        self._work = self._over = self._phase = self._from = self._share = (
            0.0  # of the trial under way, and of its part
        )
        self._began: float | None = None
        self._title = ""

    def expect(self, work: float) -> None:
        """So much work lies ahead, in forward passes or whatever it is counted in."""
        self._total += work
        self._ahead += work

    def start_trial(self, title: str, work: float) -> None:
        """A trial begins, so much of the work."""
        self._title, self._work = title, work
        self._show_title()

    def start_phase(self, work: float) -> None:
        """A part of the trial begins."""
        self._end_phase()
        if self._began is None:
            self._began = self.clock()
        self._phase = work

    def resume_phase(self, done: float) -> None:
        """The part is prepared; a share of it was done before a stop. The first preparation, which compiles, is not
        taken for the pace."""
        if not self._made:
            self._began = self.clock()
        self._from = self._share = done

    def reach(self, share: float, text: str = "") -> None:
        """The part has come so far, from 0 to 1."""
        self._share = max(min(share, 1.0), self._share)
        if self.due():
            self._show(text)

    def end(self) -> None:
        """The trial is over, done or not."""
        self._end_phase()
        self._ahead -= self._work
        self._work = self._over = 0.0

    def done_by_other(self, title: str, work: float) -> None:
        """A trial was done by another process; once there is a pace, its work counts for it."""
        if self._began is not None:
            self._made += work
        self._ahead -= work
        self.log(f"{title}: done by another process")

    def wait(self, text: str) -> None:
        """Nothing can be done for now; said once, as long as it is the same."""
        if text == self._title:
            return
        self._title = text
        self._show_title()

    def close(self, text: str, took: str, style: str | None = None) -> None:
        """A line on a trial that is over: what it came to, how long it took, how long the rest will take."""
        title = f"{self._title}: " if self.bar is not None else "  "
        times = ", ".join(part for part in (took, self.time_left()) if part)
        self.log(f"{title}{text}" + (f"  ({times})" if times else ""), style)

    def _end_phase(self) -> None:
        self._made += self._phase * (self._share - self._from)
        self._over += self._phase
        self._phase = self._from = self._share = 0.0

    @property
    def _left(self) -> float:
        return max(self._ahead - self._over - self._phase * self._share, 0.0)

    @property
    def seconds_left(self) -> float | None:
        """At the pace so far; None while there is no telling."""
        made = self._made + self._phase * (self._share - self._from)
        if not made or self._began is None:
            return None
        return self._left * (self.clock() - self._began) / made

    def time_left(self) -> str:
        """The time left, for the end of a line."""
        seconds = self.seconds_left
        return "" if not seconds else f"about {format_duration(seconds)} left"

    def live(self) -> TrainingProgress:
        """What a training shows itself through."""
        return _TrainingProgress(self)

    def watch(self, status: Status) -> None:
        """What an evaluation shows itself through."""
        if status.note is not None:
            self.log(f"  {status.note}")
            return
        what = status.attack if status.stage == status.attack else f"{status.attack}: {status.stage}"
        self.reach(status.done, f"{what}, {status.num_correct:,} of {status.examples:,} hold")

    def _show_title(self) -> None:
        if self.bar is None:
            self.log(self._title)
        else:
            self._show("")

    def _show(self, text: str) -> None:
        shown = ", ".join(part for part in (self.time_left(), text) if part)
        done = 1 - self._left / self._total if self._total else 0.0
        plain = f"  {shown}" if shown else ""
        self.show("plan", plain, description=self._title, completed=done, total=1.0, text=shown)


class _TrainingProgress(TrainingProgress):
    """A training's view of the plan's line: epochs move it on; only sentences stay."""

    def __init__(self, plan: PlanProgress) -> None:
        super().__init__(plan.console)
        self._plan = plan

    def start_run(self, undertaking: str) -> None:
        """The trial's title has said it."""

    def start(self, title: str, total: int, done: int) -> None:
        """Start where a stop left it."""
        self._total = total
        self._plan.resume_phase(done / total)

    def due(self) -> bool:
        """Whether it is time to show something."""
        return self._plan.due()

    def update(self, done: int, epoch: int, epochs: int, **status: Any) -> None:
        """In the middle of an epoch."""
        self._plan.reach(done / self._total, f"epoch {epoch + 1}/{epochs}")

    def end_epoch(self, done: int, row: dict[str, Any], epochs: int) -> None:
        """At the end of one."""
        probe = f"clean {100 * row['clean']:.0f}%, PGD-10 {100 * row['pgd10']:.0f}%"
        self._plan.reach(done / self._total, f"epoch {row['epoch'] + 1}/{epochs} done, {probe}")

    def log(self, text: str, style: str | None = None) -> None:
        """A sentence, set in under the trial's title."""
        self._plan.log(f"  {text}", style)
