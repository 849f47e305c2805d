"""Rank the sections of recipe keys in the search."""

from __future__ import annotations

import re
from typing import Any

_KEY = re.compile(r"[a-z]+\.[a-z_0-9]+")
_BOOST, _BOOST_OF_BEGINNING = 4.0, 8.0


def rank_keys(entries: list[dict[str, Any]]) -> None:
    """Raise keys above other sections, and most those that begin the names of others: the search completes words and
    prefers rare ones.

    >>> entries = [{"title": "schedule.peak"}, {"title": "schedule.peak_at"}, {"title": "Schedules"}]
    >>> rank_keys(entries)
    >>> entries
    [{'title': 'schedule.peak', 'boost': 8.0}, {'title': 'schedule.peak_at', 'boost': 4.0}, {'title': 'Schedules'}]
    """
    keys = {entry["title"] for entry in entries if _KEY.fullmatch(entry["title"])}
    for entry in entries:
        if entry["title"] in keys:
            begins = any(key != entry["title"] and key.startswith(entry["title"]) for key in keys)
            entry["boost"] = _BOOST_OF_BEGINNING if begins else _BOOST
