"""Sums by channel over many programs in a fixed order, so that results do not change between runs; batch statistics
from them.

Each program stores its partial sums. The last program of a group adds up the group, and the last of all adds up the
groups.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_GROUP = tl.constexpr(32)  # parts that are added up at a time
_COUNTERS = tl.constexpr(16384)  # for each block of columns: one of groups, and one of each group's parts


@triton.jit
def sum_partials(partials, start, count, channels: tl.constexpr, offs_c, mask_c, block_c: tl.constexpr):
    """Return the two sums by channel over `count` partials from `start` on, many partials at a time."""
    first = tl.zeros((block_c,), tl.float32)
    second = tl.zeros((block_c,), tl.float32)
    for skip in range(0, count, _GROUP):
        partial = skip + tl.arange(0, _GROUP)
        ptrs = partials + 2 * (start + partial[:, None]) * channels + offs_c[None, :]
        mask = (partial < count)[:, None] & mask_c[None, :]
        first += tl.sum(tl.load(ptrs, mask, 0.0, cache_modifier=".cg"), 0)
        second += tl.sum(tl.load(ptrs + channels, mask, 0.0, cache_modifier=".cg"), 0)
    return first, second


@triton.jit
def reduce_partials(
    first, second, partials, counters, partial, num_partials, channel_block, channels: tl.constexpr, offs_c, mask_c,
    block_c: tl.constexpr,
):
    """Store a program's partial sums. The last program of each group adds up its group. Return 1 in the program that
    finished the last group: the sums of all groups are then stored behind the partials."""
    tl.store(partials + (2 * partial) * channels + offs_c, first, mask_c)
    tl.store(partials + (2 * partial + 1) * channels + offs_c, second, mask_c)
    tl.debug_barrier()
    group = partial // _GROUP
    groups = (num_partials + _GROUP - 1) // _GROUP
    size = tl.minimum(num_partials - group * _GROUP, _GROUP)
    counters += channel_block * _COUNTERS
    last = 0
    if tl.atomic_add(counters + 1 + group, 1, sem="acq_rel") == size - 1:
        tl.debug_barrier()
        tl.store(counters + 1 + group, 0)
        of_group, second_of_group = sum_partials(partials, group * _GROUP, size, channels, offs_c, mask_c, block_c)
        tl.store(partials + 2 * (num_partials + group) * channels + offs_c, of_group, mask_c)
        tl.store(partials + (2 * (num_partials + group) + 1) * channels + offs_c, second_of_group, mask_c)
        tl.debug_barrier()
        if tl.atomic_add(counters, 1, sem="acq_rel") == groups - 1:
            tl.debug_barrier()
            tl.store(counters, 0)
            last = 1
    return last


@triton.jit
def sum_groups(partials, num_partials, channels: tl.constexpr, offs_c, mask_c, block_c: tl.constexpr):
    """Return the two sums by channel over all partials, once every group has stored its own."""
    return sum_partials(
        partials, num_partials, (num_partials + _GROUP - 1) // _GROUP, channels, offs_c, mask_c, block_c
    )


@triton.jit
def finalize_statistics(
    first,
    second,
    channels,
    offs_c,
    mask_c,
    weight,
    bias,
    running_mean,
    running_var,
    bn_state,
    pixels,
    eps,
    momentum,
    shift,
):
    """Compute mean and variance of these channels from their sums, and update the running statistics."""
    offset = first / pixels
    mean = shift + offset
    variance = tl.maximum(second / pixels - offset * offset, 0.0)
    scale = tl.load(weight + offs_c, mask_c, 0.0) * tl.rsqrt(variance + eps)
    tl.store(bn_state + offs_c, mean, mask_c)
    tl.store(bn_state + channels + offs_c, tl.rsqrt(variance + eps), mask_c)
    tl.store(bn_state + 2 * channels + offs_c, scale, mask_c)
    tl.store(bn_state + 3 * channels + offs_c, tl.load(bias + offs_c, mask_c, 0.0) - mean * scale, mask_c)
    tl.store(running_mean + offs_c, shift + momentum * (mean - shift), mask_c)
    old = tl.load(running_var + offs_c, mask_c, 0.0)
    tl.store(running_var + offs_c, old + momentum * (variance * (pixels / (pixels - 1)) - old), mask_c)


_group_counters: dict[torch.device, Tensor] = {}


def group_counters(device: torch.device) -> Tensor:
    """Return zeros that every kernel leaves as zeros."""
    if device not in _group_counters:
        _group_counters[device] = torch.zeros(64 * _COUNTERS.value, dtype=torch.int32, device=device)
    return _group_counters[device]


def empty_partials(num_partials: int, channels: int, device: torch.device) -> Tensor:
    """Allocate the sums of this many programs and of their groups; raise ValueError if they have no counters."""
    groups = triton.cdiv(num_partials, _GROUP.value)
    if groups >= _COUNTERS.value:
        raise ValueError(
            f"batch statistics of {num_partials:,} programs do not fit their counters; use a smaller batch"
        )
    return torch.empty(num_partials + groups, 2, channels, dtype=torch.float32, device=device)
