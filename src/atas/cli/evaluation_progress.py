"""Progress of an evaluation: a bar in a terminal, plain lines elsewhere.

Everything goes to standard error, so that standard output holds only the result.
"""

from __future__ import annotations

from rich.console import Console

from atas._utils.console import ProgressDisplay
from atas._utils.formatting import format_duration
from atas.evaluation import Status


class EvaluationProgress(ProgressDisplay):
    """Progress of an evaluation; a callback for `evaluate(progress=...)`."""

    refresh_interval = 0.2

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        super().__init__(console or Console(stderr=True, quiet=quiet))
        self.add_bar()
        self._title = ""
        self.logged: set[str] = set()

    def __call__(self, status: Status) -> None:
        """Show a status if an update is due; notes are shown at once."""
        if status.note is not None:
            self._log_note(status.note)
            return
        title = status.attack if status.stage == status.attack else f"{status.attack}: {status.stage}"
        is_new = self.bar is not None and title != self._title
        if not is_new and not self.due():
            return
        self._title = title
        text = f"{status.num_correct:,} of {status.examples:,} hold"
        if status.seconds_left is not None:
            text += f", at most {format_duration(status.seconds_left)} left"
        plain = f"{title}  {100 * status.done:.0f}%  {text}"
        self.show("evaluating", plain, description=title, completed=status.done, total=1.0, text=text)

    def _log_note(self, sentence: str) -> None:
        """Print a note. Without a terminal, warnings are printed with the result only."""
        if self.bar is not None or not sentence.startswith("warning:"):
            self.log(sentence)
            self.logged.add(sentence)
