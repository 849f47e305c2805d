"""Progress of a plan of runs: one bar for the whole plan in a terminal, plain lines elsewhere.

Everything goes to standard error, so that standard output holds only the result.
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
    """Progress over all trials of a plan, in units of work such as forward passes."""

    def __init__(self, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console or Console(stderr=True), clock=clock)
        self.add_bar()
        self._total = self._ahead = self._made = 0.0
        self._work = self._over = self._phase = self._from = self._share = 0.0  # of the current trial and phase
        self._began: float | None = None
        self._title = ""

    def expect(self, work: float) -> None:
        """Add `work` to the plan."""
        self._total += work
        self._ahead += work

    def start_trial(self, title: str, work: float) -> None:
        """Start a trial that is `work` of the plan."""
        self._title, self._work = title, work
        self._show_title()

    def start_phase(self, work: float) -> None:
        """Start a phase of the trial."""
        self._end_phase()
        if self._began is None:
            self._began = self.clock()
        self._phase = work

    def resume_phase(self, done: float) -> None:
        """Continue a phase of which the share `done` was finished earlier.

        The time before the first phase, which includes compilation, does not count for the estimate of the time left.
        """
        if not self._made:
            self._began = self.clock()
        self._from = self._share = done

    def reach(self, share: float, text: str = "") -> None:
        """Report that the phase has reached `share`, from 0 to 1."""
        self._share = max(min(share, 1.0), self._share)
        if self.due():
            self._show(text)

    def end(self) -> None:
        """End the trial, finished or failed."""
        self._end_phase()
        self._ahead -= self._work
        self._work = self._over = 0.0

    def done_by_other(self, title: str, work: float) -> None:
        """Report a trial that another process finished; its work counts for the pace once there is one."""
        if self._began is not None:
            self._made += work
        self._ahead -= work
        self.log(f"{title}: done by another process")

    def wait(self, text: str) -> None:
        """Show why no trial can start now; a repeated text is shown once."""
        if text == self._title:
            return
        self._title = text
        self._show_title()

    def close(self, text: str, took: str, style: str | None = None) -> None:
        """Print the result of a trial, its duration, and the time left."""
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
        """Estimated seconds until the plan is finished; None if unknown."""
        made = self._made + self._phase * (self._share - self._from)
        if not made or self._began is None:
            return None
        return self._left * (self.clock() - self._began) / made

    def time_left(self) -> str:
        """Return the time left as text; empty if unknown."""
        seconds = self.seconds_left
        return "" if not seconds else f"about {format_duration(seconds)} left"

    def live(self) -> TrainingProgress:
        """Return a progress display for a training run of the plan."""
        return _TrainingProgress(self)

    def watch(self, status: Status) -> None:
        """Show the status of an evaluation of the plan; a callback for `evaluate`."""
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
    """Progress of a training run within a plan: epochs advance the plan's bar, messages are printed."""

    def __init__(self, plan: PlanProgress) -> None:
        super().__init__(plan.console)
        self._plan = plan

    def start_run(self, headline: str) -> None:
        """Print nothing: the title of the trial is shown already."""

    def start(self, title: str, total: int, done: int, *, in_levels: bool = True) -> None:
        """Start the phase, at `done` of `total` steps after a resume."""
        self._total = total
        self._plan.resume_phase(done / total)

    def due(self) -> bool:
        """Return whether it is time for an update."""
        return self._plan.due()

    def update(self, done: int, epoch: int, epochs: int, **status: Any) -> None:
        """Show the position within an epoch."""
        self._plan.reach(done / self._total, f"epoch {epoch + 1}/{epochs}")

    def end_epoch(self, done: int, row: dict[str, Any], epochs: int) -> None:
        """Show the end of an epoch."""
        probe = f", clean {100 * row['clean']:.0f}%, PGD-10 {100 * row['pgd10']:.0f}%" if "pgd10" in row else ""
        self._plan.reach(done / self._total, f"epoch {row['epoch'] + 1}/{epochs} done{probe}")

    def end_run(self) -> None:
        """Print nothing: the plan has its own times."""

    def log(self, text: str, style: str | None = None, *, wrap: bool = True) -> None:
        """Print a line, indented under the title of the trial."""
        self._plan.log(f"  {text}", style, wrap=wrap)
