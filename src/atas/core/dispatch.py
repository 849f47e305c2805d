"""Dispatch to fast implementations.

Functions marked `@fast_op` run as plain PyTorch. Inside `use_fast_ops`, a kernel that was given for the function runs
instead if it supports the arguments; otherwise the function is compiled with torch.compile, once. Such a function takes
tensors, plain values and networks, and returns tensors and plain values.
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

Kernels = Mapping[Callable[..., Any], Callable[..., Any]]

_RECOMPILE_LIMIT = 64  # a process may train many models, one after the other
_backend: str | None = None
_kernels: Kernels = {}


def fast_op(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that may have a faster implementation inside `use_fast_ops`."""
    compiled_for = functools.cache(functools.partial(compile_function, function))

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        found = _kernels[call](*args, **kwargs) if call in _kernels else NotImplemented
        if found is not NotImplemented:
            return found
        return (function if _backend is None else compiled_for(_backend))(*args, **kwargs)

    return call


@contextmanager
def use_fast_ops(compile_with: str | None, kernels: Kernels | None = None) -> Iterator[None]:
    """Run the functions marked `@fast_op` by their fast implementations.

    `kernels` maps such functions to kernels that take the same arguments and return NotImplemented for those that they
    do not support. All others are compiled with the torch.compile backend `compile_with`; None compiles nothing.
    """
    global _backend, _kernels
    before = _backend, _kernels
    _backend, _kernels = compile_with, kernels or {}
    try:
        yield
    finally:
        _backend, _kernels = before


def compile_function(function: Callable[P, R], backend: str, *, dynamic: bool | None = False) -> Callable[P, R]:
    """Compile a function with torch.compile, again for every shape; dynamic=None: not for dimensions that are marked
    dynamic.

    The compiler is not loaded before this is called.
    """
    form = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # advice to be less exact
            return form(*args, **kwargs)

    return call
