"""Whose turn it is: trials of one plan, shared among processes that work in the same folder."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import groupby

from atas.reproduce.claims import Claims
from atas.reproduce.execute import is_done
from atas.reproduce.store import Store
from atas.reproduce.trial import Trial


def turns(trials: Sequence[Trial], store: Store, claims: Claims, wait: Callable[[int], object]) -> Generator[Trial]:
    """The trials, one after the other, while no other process is at their training.

    Those that others are at, or that rest on such, are put off; where nothing else is left, `wait` is called with their
    number. A trial that another process gave up, finished or not, has its turn here.
    """
    left = [list(some) for _, some in groupby(trials, key=lambda trial: trial.training_key)]
    while left:
        later: list[list[Trial]] = []
        for some in left:
            put_off = {one[0].training_key for one in later}
            missing = [other for trial in some for other in trial.rests_on if not is_done(other, store)]
            if any(other.training_key in put_off or _under_way(other, claims) for other in missing):
                later.append(some)
                continue
            with claims.claim(some[0].training_key) as free:
                if free:
                    yield from some
                else:
                    later.append(some)
        if len(later) == len(left):
            wait(sum(map(len, later)))
        left = later


def _under_way(trial: Trial, claims: Claims) -> bool:
    """Whether another process is at a trial."""
    with claims.claim(trial.training_key) as free:
        return not free
