"""Errors that are meant for the user: one sentence with the cause and the remedy, no traceback on the command line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

MAX_LISTED = 5


class AtasError(Exception):
    """Something failed that the user can mend; the command exits with status 1."""

    exit_status = 1
    on_all_ranks = False  # whether each of several processes raises it, so that one of them says it for all


class UsageError(AtasError, ValueError):
    """The call itself is wrong (an unknown name, a value out of range); the command exits with status 2."""

    exit_status = 2
    on_all_ranks = True


class DataError(AtasError, ValueError):
    """Data is missing, damaged, or not what it should be."""


class CheckpointError(AtasError, RuntimeError):
    """A checkpoint cannot be written, cannot be read, or belongs to another run."""


def first_few(names: Sequence[object], between: str = ", ") -> str:
    """The first five of what may be many, and how many more there are.

    >>> first_few("abc"), first_few("abcdefgh", "; ")
    ('a, b, c', 'a; b; c; d; e and 3 more')
    """
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{between.join(map(str, names[:MAX_LISTED]))}{more}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was likely meant: one that begins with what was given, or else one that looks like it.

    >>> nearest("resnet", ["preact-resnet18", "resnet18"]), nearest("atass", ["atta", "atas"]), nearest("x", ["atas"])
    ('resnet18', 'atas', None)
    """
    known = list(known)
    longer = [other for other in known if name and other.startswith(name)]
    return next(iter(longer or difflib.get_close_matches(name, known, n=1, cutoff=0.5)), None)


def unknown(kind: str, name: str, known: Iterable[str], see: str | None = None) -> UsageError:
    """The error for a name that is not known, with the nearest one that is; `see` is where to find a long list.

    >>> str(unknown("method", "atass", ["atas", "atta"]))
    "unknown method 'atass'; did you mean 'atas'? Known: atas, atta."
    """
    known = list(known)
    near = nearest(name, known)
    hint = f"; did you mean '{near}'?" if near else "."
    return UsageError(f"unknown {kind} '{name}'{hint} {see or 'Known: ' + ', '.join(known)}.")
