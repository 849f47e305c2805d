"""Paths and amounts as people write them."""

from __future__ import annotations

import shlex
from pathlib import Path


def in_shell(path: str | Path) -> str:
    """A path as it stands in a command that is shown, to be copied.

    >>> in_shell("runs/first"), in_shell("runs/my first")
    ('runs/first', "'runs/my first'")
    """
    return shlex.quote(str(path))


def in_bytes(size: float) -> str:
    """So many bytes as people write them.

    >>> in_bytes(491_520), in_bytes(252e9)
    ('492 kB', '252 GB')
    """
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}" if size < 100 * unit else f"{size / unit:,.0f} {name}"
    return f"{size / 1e3:,.0f} kB"
