"""What the small kernels have in common: how a batch of images is cut up, and arithmetic as torch does it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from atas.augment import View

_BLOCK = 1024  # entries that a program takes at a time

# Products are not joined with the sums that follow them: torch rounds after each.
AS_TORCH = {"enable_fp_fusion": False}


@triton.jit
def window(at, top, left, flip, height: tl.constexpr, width: tl.constexpr):  # type: ignore[no-untyped-def]
    """Channel, canvas row and canvas column that these entries of a view show."""
    pixel = at % (height * width)
    column = pixel % width
    column = tl.where(flip, width - 1 - column, column)
    return at // (height * width), top.to(tl.int32) + pixel // width, left.to(tl.int32) + column


@dataclass(frozen=True)
class Cut:
    """A batch of images, one row of programs each."""

    grid: tuple[int, int]
    size: int
    block: int

    @classmethod
    def of(cls, x: Tensor) -> Cut:
        """How a batch of this shape is cut up."""
        size = x[0].numel()
        block = min(_BLOCK, triton.next_power_of_2(size))
        return cls((len(x), triton.cdiv(size, block)), size, block)

    def sizes(self) -> dict[str, int]:
        """What every kernel is told."""
        return {"size": self.size, "block": self.block}


def frame(view: View, shape: torch.Size) -> dict[str, int]:
    """What kernels that look through a view are told."""
    return {"height": shape[-2], "width": shape[-1], "pad": view.pad}


def places(index: Tensor, view: View) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The examples of a batch and where their windows lie, as kernels read them."""
    return index.contiguous(), view.top.contiguous(), view.left.contiguous(), view.flip.contiguous()


def inverse(number: float) -> float:
    """One over a number, rounded to float32. To divide by a number, torch on a GPU multiplies by this."""
    return float(torch.tensor(1 / number, dtype=torch.float32))


def usual(*images: Tensor) -> bool:
    """Whether these are batches of float32 images through which no gradient is asked for."""
    return all(x.dtype == torch.float32 and x.dim() == 4 and len(x) and not x.requires_grad for x in images)
