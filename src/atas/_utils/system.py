"""Processors, memory and the cache folder that this process may use."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # versions 2 and 1
# PyTorch raises RuntimeError, the system's loader ImportError, and an interpreter without memory SystemError.
_OUT_OF_MEMORY = re.compile(
    r"can't allocate memory|not enough memory|out of memory|[Cc]annot allocate memory|failed to map segment|"
    r"unable to mmap|can't start new thread|returned NULL without setting an exception|"
    r"error return without exception set|"
    r"could not create a primitive"  # oneDNN
)


def host_memory(limits: Sequence[str | Path] = _CGROUP_LIMITS) -> int:
    """Return the memory in bytes that this process may use.

    It is the machine's memory, or the limit of its container, divided among the processes that torchrun started here.
    `limits` are files that may hold such a limit.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in limits:
        with contextlib.suppress(OSError, ValueError):  # no such file, or the limit is `max`
            memory = min(memory, int(Path(file).read_text()))
    return memory // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that this machine or its GPU has no memory left."""
    return isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(str(error)) is not None


def available_cpus() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cache_dir() -> Path:
    """Return $ATAS_CACHE, or `atas` in the user's cache folder."""
    if named := os.environ.get("ATAS_CACHE"):
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "atas"
