"""The type of callbacks that report progress."""

from __future__ import annotations

from collections.abc import Callable

ProgressCallback = Callable[[str, int, int | None], None]
"""Called with what is being done, how much of it is done (bytes or images), and how much it is in all, if known."""
