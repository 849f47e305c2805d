"""The moving average of all weights in one kernel that reads and writes every entry once.

The kernel finds its tensors through a table of addresses. Its arithmetic is that of the plain version, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from atas.ops.triton.launch import NO_FMA, can_launch

_BLOCK = 4096


@triton.jit
def _average_block(averages, values, at, inside, decay):
    """These entries of one average."""
    value = tl.load(values + at, inside) * (1 - decay)
    tl.store(averages + at, tl.load(averages + at, inside) * decay + value, inside)


@triton.jit
def _average_kernel(table, owners, starts, sizes, decays, count, size: tl.constexpr):
    """One block of one average. `table` holds the addresses of averages and values.

    Whole blocks go without a mask, so that they are read and written sixteen bytes at a time.
    """
    block = tl.program_id(0)
    row = tl.load(owners + block)
    start = tl.load(starts + block)
    at = tl.multiple_of(start, size) + tl.arange(0, size)
    end = tl.load(sizes + row)
    averages = tl.multiple_of(tl.load(table + row).to(tl.pointer_type(tl.float32)), 16)
    values = tl.multiple_of(tl.load(table + count + row).to(tl.pointer_type(tl.float32)), 16)
    decay = tl.load(decays)
    if start + size <= end:
        _average_block(averages, values, at, None, decay)
    else:
        _average_block(averages, values, at, at < end, decay)


def is_supported(average: Tensor, value: Tensor) -> bool:
    """Return whether the kernel can average this tensor: dense float32 with the layout of its average."""
    return (
        average.dtype == value.dtype == torch.float32
        and average.stride() == value.stride()
        and average.numel() > 0
        and all(can_launch(x) and x.data_ptr() % 16 == 0 and _is_dense(x) for x in (average, value))
    )


def _is_dense(x: Tensor) -> bool:
    return x.is_contiguous() or (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))


class AverageUpdate:
    """Averages tensors with others, always the same ones: averages <- decay averages + (1 - decay) values."""

    def __init__(self, averages: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self._tensors = [*averages], [*values]  # they keep their memory
        device, sizes = averages[0].device, [average.numel() for average in averages]
        addresses = [[tensor.data_ptr() for tensor in side] for side in self._tensors]
        blocks = [(owner, start) for owner, size in enumerate(sizes) for start in range(0, size, _BLOCK)]
        self._count = len(averages)
        self._table = torch.tensor(addresses, dtype=torch.int64, device=device)
        self._owners, self._starts = (column.contiguous() for column in torch.tensor(blocks, device=device).unbind(1))
        self._sizes = torch.tensor(sizes, device=device)

    def __call__(self, decay: Tensor) -> None:
        """Update the averages; `decay` is a float32 number on the device."""
        grid = (len(self._owners),)
        tensors = self._table, self._owners, self._starts, self._sizes
        _average_kernel[grid](*tensors, decay, self._count, size=_BLOCK, num_warps=8, **NO_FMA)
