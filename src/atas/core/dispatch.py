"""Dispatch to fast implementations.

Functions marked `@fast_op` run as plain PyTorch. Inside `use_fast_ops`, the kernel that is registered for the function
by `@implements` runs instead if it supports the arguments; otherwise the function is compiled with torch.compile, once.
Such a function takes tensors, plain values and networks, and returns tensors and plain values.

>>> @fast_op
... def double(x: Tensor) -> Tensor:
...     return x + x
>>> @implements(double)
... def double_by_shift(x: Tensor) -> Tensor:
...     '''Integers.'''
...     return NotImplemented if x.is_floating_point() else x << 1
>>> with use_fast_ops():
...     double(torch.tensor(3)), double(torch.tensor(0.5))
(tensor(6), tensor(1.))
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_RECOMPILE_LIMIT = 64  # a process may train many models, one after the other
_enabled = False
_backend: str | None = None
_kernels: dict[Callable[..., Any], Callable[..., Any] | None] = {}  # by fast op; None: there is no kernel


def fast_op(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function that may have a faster implementation inside `use_fast_ops`."""
    compiled_for = functools.cache(functools.partial(compile_function, function))

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or not _enabled:
            return function(*args, **kwargs)
        kernel = _kernels[call]
        result = NotImplemented if kernel is None else kernel(*args, **kwargs)
        if result is not NotImplemented:
            return result
        return (function if _backend is None else compiled_for(_backend))(*args, **kwargs)

    _kernels[call] = None
    return call


def implements(function: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a kernel for a function that is marked `@fast_op`.

    The kernel takes the same arguments and returns NotImplemented for those that it does not support. The first line of
    its docstring says which it supports.
    """
    if function not in _kernels:
        raise ValueError(f"{function.__module__}.{function.__qualname__} is not marked @fast_op")

    def register(kernel: Callable[P, R]) -> Callable[P, R]:
        if _kernels[function] not in (None, kernel):
            raise ValueError(f"{function.__module__}.{function.__qualname__} already has a kernel")
        _kernels[function] = kernel
        return kernel

    return register


class FastOp(NamedTuple):
    """A row of `table`: a marked function, its kernel if it has one, and the arguments that the kernel supports."""

    function: Callable[..., Any]
    kernel: Callable[..., Any] | None
    supports: str

    def __str__(self) -> str:
        name = f"{self.function.__module__}.{self.function.__qualname__}"
        if self.kernel is None:
            return f"{name}: compiled"
        path = self.kernel.__module__.removeprefix("atas.").replace(".", "/")
        return f"{name}: {self.kernel.__qualname__} in {path}.py. {self.supports}"


def table() -> list[FastOp]:
    """Return all functions that are marked `@fast_op` in the modules imported so far, with their kernels."""
    return [
        FastOp(function, kernel, "" if kernel is None else (kernel.__doc__ or "").partition("\n")[0])
        for function, kernel in _kernels.items()
    ]


@contextmanager
def use_fast_ops(compile_with: str | None = None) -> Iterator[None]:
    """Run the functions marked `@fast_op` by their kernels.

    Functions without a kernel for the arguments are compiled with the torch.compile backend `compile_with`; None
    compiles nothing.
    """
    global _enabled, _backend
    before = _enabled, _backend
    _enabled, _backend = True, compile_with
    try:
        yield
    finally:
        _enabled, _backend = before


def compile_function(
    function: Callable[P, R],
    backend: str,
    *,
    dynamic: bool | None = False,
    log: Callable[[str], None] = lambda sentence: None,
) -> Callable[P, R]:
    """Compile a function with torch.compile, again for every shape; with dynamic=None, not again for dimensions that
    are marked dynamic.

    A function that cannot be one graph is compiled in parts; `log` is called with a sentence that says so. The compiler
    is not loaded before this is called.
    """
    whole = torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)
    parts: list[Callable[P, R]] = []

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._dynamo.config.patch(recompile_limit=_RECOMPILE_LIMIT), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")  # advice to be less exact
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")  # the compiler looks at it
            if not parts:
                try:
                    return whole(*args, **kwargs)
                except torch._dynamo.exc.Unsupported as error:
                    why = str(error).strip().partition("\n")[0]
                    log(f"the network cannot be compiled as one graph ({why}); compiling it in parts")
                    parts.append(torch.compile(function, backend=backend, dynamic=dynamic))
            return parts[0](*args, **kwargs)

    return call
