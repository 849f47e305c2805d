"""Paths and amounts as people write them."""

from __future__ import annotations

import shlex
from pathlib import Path


def shell_quote(path: str | Path) -> str:
    """A path as it stands in a command that is shown, to be copied.

    >>> shell_quote("runs/first"), shell_quote("runs/my first")
    ('runs/first', "'runs/my first'")
    """
    return shlex.quote(str(path))


def format_bytes(size: float) -> str:
    """So many bytes as people write them.

    >>> format_bytes(491_520), format_bytes(252e9)
    ('492 kB', '252 GB')
    """
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}" if size < 100 * unit else f"{size / unit:,.0f} {name}"
    return f"{size / 1e3:,.0f} kB"
