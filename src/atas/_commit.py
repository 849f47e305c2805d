"""Which commit of the package's own history this is."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

_SECONDS = 10


@functools.cache
def commit() -> str | None:
    """The commit of the checkout that the package lies in, with "+" where its files were changed since; else None.

    Of a copy whose history is not that of its files, the environment variable ATAS_COMMIT says it.
    """
    if told := os.environ.get("ATAS_COMMIT"):
        return told
    folder = Path(__file__).resolve().parent
    # A package that is installed inside of someone else's checkout is not part of it.
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    found = _git(folder, "rev-parse", "HEAD")
    if not found:
        return None
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".")
    return found + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints, or None where it fails or is not there."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
