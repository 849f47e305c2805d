"""Launching kernels, and compiling all that a pass will need at once.

Triton compiles a kernel when it is first launched, one after the other: a minute for a whole network. In a rehearsal
nothing is launched; what would be is handed to threads that compile side by side.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton

_rehearsing = False


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
    """Run a kernel; in a rehearsal only have it compiled."""
    if _rehearsing:
        kernel.warmup(*args, grid=grid, **kwargs)
    else:
        kernel[grid](*args, **kwargs)


@contextmanager
def side_by_side() -> Iterator[None]:
    """Kernels that are rehearsed inside are compiled in threads. One that is launched inside is waited for, and at the
    end so are all."""
    if not hasattr(triton, "AsyncCompileMode"):  # then one after the other
        yield
        return
    with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool):
        yield


@functools.cache
def has_copy_engine(device: torch.device) -> bool:
    """Whether the kernels that fetch whole tiles run well there: on Hopper and on data-centre Blackwell."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)


@contextmanager
def rehearsal() -> Iterator[None]:
    """Launch nothing inside; results are whatever memory held."""
    global _rehearsing
    before, _rehearsing = _rehearsing, True
    try:
        yield
    finally:
        _rehearsing = before
