"""Rank the pages and the sections of recipe keys in the search."""

from __future__ import annotations

import re
from typing import Any

_KEY = re.compile(r"[a-z]+\.[a-z_0-9]+")
# Found by typing all keys and the names of guides. Measurements come after what explains how to do something.
_KEYS, _BEGINNINGS, _PAGES, _RESULTS = 2.5, 5.0, 2.0, 0.3


def rank_entries(entries: list[dict[str, Any]]) -> None:
    """Raise pages and keys above other sections, and most the keys that begin the names of others: the search completes
    words and prefers rare ones. Lower the files of results.

    >>> titles = {"a.html": "Rates", "b.html#p": "schedule.peak", "b.html#q": "schedule.peak_at", "c.html#d": "Rest"}
    >>> entries = [{"location": location, "title": title} for location, title in titles.items()]
    >>> rank_entries(entries)
    >>> [entry.get("boost") for entry in entries]
    [2.0, 5.0, 2.5, None]
    """
    keys = {entry["title"] for entry in entries if _KEY.fullmatch(entry["title"])}
    for entry in entries:
        title, location = entry["title"], entry["location"]
        if title in keys:
            entry["boost"] = _BEGINNINGS if any(key != title and key.startswith(title) for key in keys) else _KEYS
        elif location.startswith("results/"):
            entry["boost"] = _RESULTS
        elif "#" not in location:
            entry["boost"] = _PAGES
