"""Errors for users: one sentence with cause and remedy. The command line shows no traceback for them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

MAX_LISTED = 5


class AtasError(Exception):
    """Something failed that the user can fix; the command exits with status 1."""

    exit_status = 1
    on_all_ranks = False  # True if every rank raises it, so that only rank 0 prints it


class UsageError(AtasError, ValueError):
    """The call is wrong (an unknown name, a value out of range); the command exits with status 2."""

    exit_status = 2
    on_all_ranks = True


class DataError(AtasError, ValueError):
    """Data is missing, damaged or of the wrong kind."""


class MissingTestImagesError(DataError):
    """Data has training images and no test images."""


class CheckpointError(AtasError, RuntimeError):
    """A checkpoint cannot be written, cannot be read, or belongs to another run."""


class SettingsWarning(UserWarning):
    """A setting of a training method that is valid but cannot work well, such as steps far shorter than eps."""


def first_few(names: Sequence[object], between: str = ", ") -> str:
    """Join the first five names, and say how many more there are.

    >>> first_few("abc"), first_few("abcdefgh", "; ")
    ('a, b, c', 'a; b; c; d; e and 3 more')
    """
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{between.join(map(str, names[:MAX_LISTED]))}{more}"


def nearest(name: str, known: Iterable[str], similarity: float = 0.5) -> str | None:
    """Return the known name that was probably meant: `name` without a last letter too many, one that begins with
    `name`, or else one of this similarity (0 to 1).

    >>> nearest("resnet", ["preact-resnet18", "resnet18"]), nearest("atass", ["atta", "atas"]), nearest("x", ["atas"])
    ('resnet18', 'atas', None)
    >>> nearest("crops", ["cropshift", "crop"]), nearest("peek", ["seed", "peak"], similarity=0.75)
    ('crop', 'peak')
    """
    known = list(known)
    if name[:-1] in known:
        return name[:-1]
    completions = [other for other in known if name and other.startswith(name)]
    return next(iter(completions or difflib.get_close_matches(name, known, n=1, cutoff=similarity)), None)


def unknown(kind: str, name: str, known: Iterable[str], see: str | None = None) -> UsageError:
    """Return the error for an unknown name, with the nearest known one; `see` says where to find a long list.

    >>> str(unknown("method", "atass", ["atas", "atta"]))
    "unknown method 'atass'; did you mean 'atas'? Known: atas, atta."
    """
    known = list(known)
    suggestion = nearest(name, known)
    hint = f"; did you mean '{suggestion}'?" if suggestion else "."
    return UsageError(f"unknown {kind} '{name}'{hint} {see or 'Known: ' + ', '.join(known)}.")
