"""Small tensor functions that a compiled engine runs as one kernel instead of dozens.

A function marked `fusable` runs as it is written, unless it is called inside of `fused`: then a kernel written by hand
runs in its place where there is one that covers the arguments, and otherwise the function is compiled, once, and the
compiled form runs. It takes tensors, plain values and networks, and returns tensors and plain values.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

ByHand = Mapping[Callable[..., Any], Callable[..., Any]]

_RECOMPILES = 64  # a process may train many models, one after the other
_backend: str | None = None
_by_hand: ByHand = {}


def fusable(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function for compilation inside of `fused`."""
    in_form = functools.cache(functools.partial(compiled, function))

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        found = _by_hand[call](*args, **kwargs) if call in _by_hand else NotImplemented
        if found is not NotImplemented:
            return found
        return (function if _backend is None else in_form(_backend))(*args, **kwargs)

    return call


@contextmanager
def fused(backend: str | None, by_hand: ByHand | None = None) -> Iterator[None]:
    """Run the fusable functions that are called inside in a faster form.

    `by_hand` maps such functions to others that take the same arguments and return NotImplemented for those that they
    do not cover. What is left is compiled with this backend of torch.compile; None for not at all.
    """
    global _backend, _by_hand
    before = _backend, _by_hand
    _backend, _by_hand = backend, by_hand or {}
    try:
        yield
    finally:
        _backend, _by_hand = before


def compiled(function: Callable[P, R], backend: str, *, dynamic: bool | None = False) -> Callable[P, R]:
    """The function by torch.compile, anew for every shape, or with None for those that are not marked as dynamic.

    Nothing of the compiler is loaded before this is called.
    """
    form = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._dynamo.config.patch(recompile_limit=_RECOMPILES), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # advice to be less exact
            return form(*args, **kwargs)

    return call
