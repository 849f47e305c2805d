"""What the machine has: processors and memory that this process may use."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_CGROUP_LIMITS = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)  # new systems, and old ones


def host_memory() -> int:
    """The machine's memory in bytes, or what a container has of it; an equal part where torchrun started several."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # there is none, or it says `max`
            found = min(found, int(Path(limit).read_text()))
    return found // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def available_cpus() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
