"""Launching kernels, compiling them in parallel, and helpers for kernels on batches of images.

Triton compiles a kernel when it is first launched, one after the other: a minute for a whole network. Inside
`compile_only` nothing is launched; kernels are handed to threads that compile them in parallel.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
import triton
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

_compiling_only = False


def first_order(backward: Callable[P, R]) -> Callable[P, R]:
    """Mark the backward pass of an autograd function whose result is a constant to autograd.

    With create_graph=True it raises an error at once. `once_differentiable` would not do: it lets a gradient that
    itself needs none pass, such as the 1 at the loss, and second derivatives then are silently zero.
    """

    @functools.wraps(backward)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.is_grad_enabled():
            raise RuntimeError("the kernels have no second derivative")
        return backward(*args, **kwargs)

    return call


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
    """Launch a kernel; inside `compile_only`, compile it."""
    if _compiling_only:
        kernel.warmup(*args, grid=grid, **kwargs)
    else:
        kernel[grid](*args, **kwargs)


@contextmanager
def parallel_compile() -> Iterator[None]:
    """Compile the kernels of `compile_only` in threads. A launch waits for its kernel; the end of the block waits for
    all."""
    if not hasattr(triton, "AsyncCompileMode"):  # then one after the other
        yield
        return
    with ThreadPoolExecutor(os.cpu_count()) as pool, triton.AsyncCompileMode(pool):
        yield


@functools.cache
def has_tma(device: torch.device) -> bool:
    """Return whether kernels with TMA loads run well on the device: on Hopper and on data-centre Blackwell."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)


@contextmanager
def compile_only() -> Iterator[None]:
    """Compile kernels instead of launching them; results are uninitialised memory."""
    global _compiling_only
    before, _compiling_only = _compiling_only, True
    try:
        yield
    finally:
        _compiling_only = before


_BLOCK = 1024  # entries that a program takes at a time

# Products are not joined with the sums that follow them: torch rounds after each.
NO_FMA = {"enable_fp_fusion": False}


@dataclass(frozen=True)
class ImageGrid:
    """The programs for a batch of images: one row of programs per image."""

    grid: tuple[int, int]
    size: int
    block: int

    @classmethod
    def of(cls, x: Tensor) -> ImageGrid:
        """Return the grid for a batch of this shape."""
        size = x[0].numel()
        block = min(_BLOCK, triton.next_power_of_2(size))
        return cls((len(x), triton.cdiv(size, block)), size, block)

    def kernel_args(self) -> dict[str, int]:
        """Return the arguments that every kernel on images takes."""
        return {"size": self.size, "block": self.block}


def float32_reciprocal(number: float) -> float:
    """Return 1 / number, rounded to float32. On a GPU, torch divides by a number by multiplying with this."""
    return float(torch.tensor(1 / number, dtype=torch.float32))


def can_launch(x: Tensor) -> bool:
    """Return whether kernels run on the device of this tensor; Triton's interpreter runs them on the CPU."""
    return x.is_cuda or triton.knobs.runtime.interpret


def is_plain_float32(*images: Tensor) -> bool:
    """Return whether these are batches of float32 images on the GPU that need no gradient."""
    return all(
        x.dtype == torch.float32 and x.dim() == 4 and len(x) and not x.requires_grad and can_launch(x) for x in images
    )
