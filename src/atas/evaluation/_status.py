"""How far an evaluation is, and how long the rest may take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

Key = tuple[int, str, int]  # portion, attack, stage


@dataclass(frozen=True)
class Status:
    """What is told to whoever watches."""

    attack: str
    """The attack under way, by the name that it was asked for."""
    doing: str
    """Its stage, or the attack itself where it has none."""
    right: int
    """Examples of this portion that hold so far, or that are still to be looked at."""
    examples: int
    """Examples of this portion."""
    done: float
    """Share of all the work, from 0 to 1; the work shrinks when examples break."""
    seconds_left: float | None
    """At most, if it goes on at this pace; None while there is no telling."""
    note: str | None = None
    """A sentence to show."""


Watcher = Callable[[Status], None]


class Meter:
    """Counts work, in forward passes of the model: done by this process, done before a stop, and left at most."""

    def __init__(self, watcher: Watcher | None) -> None:
        self._watcher = watcher
        self._left: dict[Key, float] = {}
        self._made = self._before = 0.0
        self._began: float | None = None
        self._last = Status("", "", 0, 0, 0.0, None)

    def expect(self, key: Key, work: float) -> None:
        """So much is left of a task at most. The first time, the clock starts."""
        self._began = self._began or time.monotonic()
        self._left[key] = work

    def took_over(self, work: float) -> None:
        """So much was done before a stop."""
        self._before += work

    def made(self, work: float) -> None:
        """So much more was done."""
        self._made += work

    def tell(self, attack: str, doing: str, right: int, examples: int) -> None:
        """Tell the watcher, if there is one."""
        left = sum(self._left.values())
        done = self._made + self._before
        seconds = (time.monotonic() - self._began) / self._made * left if self._made and self._began else None
        self._last = Status(attack, doing, right, examples, done / max(done + left, 1), seconds)
        if self._watcher is not None:
            self._watcher(self._last)

    def say(self, sentence: str) -> None:
        """A sentence for the watcher."""
        if self._watcher is not None:
            last = self._last
            self._watcher(
                Status(last.attack, last.doing, last.right, last.examples, last.done, last.seconds_left, sentence)
            )
