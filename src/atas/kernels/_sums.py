"""Column sums over many programs, in a fixed order, so that results do not change between runs.

Each program leaves its part in memory, the last one of a group adds up the group's, and the last one of all adds up the
groups'.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_GROUP = tl.constexpr(32)  # parts that are added up at a time
_COUNTERS = tl.constexpr(1024)  # for each block of columns: one of groups, and one of each group's parts


@triton.jit
def add_up(parts, start, count, columns: tl.constexpr, at, inside, block_columns: tl.constexpr):  # type: ignore[no-untyped-def]
    """The two column sums over `count` parts from `start` on, many parts at a time."""
    first = tl.zeros((block_columns,), tl.float32)
    second = tl.zeros((block_columns,), tl.float32)
    for skip in range(0, count, _GROUP):
        part = skip + tl.arange(0, _GROUP)
        cells = parts + 2 * (start + part[:, None]) * columns + at[None, :]
        valid = (part < count)[:, None] & inside[None, :]
        first += tl.sum(tl.load(cells, valid, 0.0, cache_modifier=".cg"), 0)
        second += tl.sum(tl.load(cells + columns, valid, 0.0, cache_modifier=".cg"), 0)
    return first, second


@triton.jit
def leave(  # type: ignore[no-untyped-def]
    first, second, parts, counters, part, count, column_block, columns: tl.constexpr, at, inside,
    block_columns: tl.constexpr,
):  # fmt: skip
    """Leave a program's sums in memory. The last of each group of programs adds up the group's; 1 for the program that
    finished the last group: the sums of all groups are then there, behind the parts."""
    tl.store(parts + (2 * part) * columns + at, first, inside)
    tl.store(parts + (2 * part + 1) * columns + at, second, inside)
    tl.debug_barrier()
    group = part // _GROUP
    groups = (count + _GROUP - 1) // _GROUP
    size = tl.minimum(count - group * _GROUP, _GROUP)
    counters += column_block * _COUNTERS
    last = 0
    if tl.atomic_add(counters + 1 + group, 1, sem="acq_rel") == size - 1:
        tl.debug_barrier()
        tl.store(counters + 1 + group, 0)
        of_group, second_of_group = add_up(parts, group * _GROUP, size, columns, at, inside, block_columns)
        tl.store(parts + 2 * (count + group) * columns + at, of_group, inside)
        tl.store(parts + (2 * (count + group) + 1) * columns + at, second_of_group, inside)
        tl.debug_barrier()
        if tl.atomic_add(counters, 1, sem="acq_rel") == groups - 1:
            tl.debug_barrier()
            tl.store(counters, 0)
            last = 1
    return last


@triton.jit
def all_groups(parts, count, columns: tl.constexpr, at, inside, block_columns: tl.constexpr):  # type: ignore[no-untyped-def]
    """The two column sums over all parts, once every group has left its own."""
    return add_up(parts, count, (count + _GROUP - 1) // _GROUP, columns, at, inside, block_columns)


_counters: dict[torch.device, Tensor] = {}


def counter(device: torch.device) -> Tensor:
    """Zeros that every kernel leaves as zeros."""
    if device not in _counters:
        _counters[device] = torch.zeros(64 * _COUNTERS.value, dtype=torch.int32, device=device)
    return _counters[device]


def space(parts: int, columns: int, device: torch.device) -> Tensor:
    """Room for the column sums of so many programs and of their groups."""
    return torch.empty(parts + triton.cdiv(parts, _GROUP.value), 2, columns, dtype=torch.float32, device=device)
