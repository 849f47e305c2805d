"""Small tensor functions that a compiled engine runs as one kernel instead of dozens.

A function marked `fusable` runs as it is written, unless it is called inside of `fused(backend)`: then it is compiled,
once, and the compiled form runs. It takes and returns tensors and plain values alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_backend: str | None = None


def fusable(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function for compilation inside of `fused`."""

    @functools.cache
    def compiled(backend: str) -> Callable[P, R]:
        return torch.compile(function, backend=backend, dynamic=False, fullgraph=True)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if _backend is None or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        return compiled(_backend)(*args, **kwargs)

    return call


@contextmanager
def fused(backend: str | None) -> Iterator[None]:
    """Compile fusable functions that are called inside, with this backend of torch.compile; None for not at all."""
    global _backend
    before, _backend = _backend, backend
    try:
        yield
    finally:
        _backend = before
