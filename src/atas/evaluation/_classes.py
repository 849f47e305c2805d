"""Whether a model and data mean the same by their classes: labels are numbers, and only names say what of."""

from __future__ import annotations

from collections.abc import Sequence

from atas.errors import DataError, few


def check_classes(known: Sequence[str], found: Sequence[str]) -> None:
    """Refuse data whose classes are not those that a model was trained on, where both have names; nothing is known of a
    model without any."""
    known, found = list(known), list(found)
    if not known or found == known or not _comparable(known, found):
        return
    more, less = sorted(set(found) - set(known)), sorted(set(known) - set(found))
    differences = [
        f"{what} {few(names)}" for what, names in (("only in the data:", more), ("missing there:", less)) if names
    ]
    raise DataError(
        f"the data has other classes than the model was trained on ({'; '.join(differences) or 'their order'}); give "
        f"data with the same class names in the same order"
    )


def _comparable(known: list[str], found: list[str]) -> bool:
    """Classes without names have numbers; beside names these say nothing.

    >>> _comparable(["0", "1"], ["cat", "dog"]), _comparable(["0", "1", "2"], ["0", "2"])
    (False, True)
    """
    numbered = any(names == [str(number) for number in range(len(names))] for names in (known, found))
    return not numbered or not set(known).isdisjoint(found)
