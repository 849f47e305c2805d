"""Where data lives when nobody says."""

from __future__ import annotations

import os
from pathlib import Path


def resolve_root(root: str | os.PathLike[str] | None) -> Path:
    """The folder given, else the one that ATAS_DATA names, else ./data."""
    return Path(root or os.environ.get("ATAS_DATA") or "data").expanduser()
