"""The type of callbacks that report progress."""

from __future__ import annotations

from collections.abc import Callable

ProgressCallback = Callable[[str, int, int | None], None]
"""Called with the name of the task, the amount done (bytes or images), and the total, if known."""
