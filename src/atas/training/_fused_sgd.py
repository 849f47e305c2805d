"""The optimiser's step for all weights as one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from atas.training import recipe
from atas.training.sgd import SGD

_BLOCK = 4096


@triton.jit
def _change(  # type: ignore[no-untyped-def]
    weights, momenta, gradients, copies, at, inside, rate, momentum, decay, nesterov: tl.constexpr, low: tl.constexpr
):
    """These entries of one weight, its momentum and its working copy."""
    weight = tl.load(weights + at, inside)
    gradient = tl.load(gradients + at, inside).to(tl.float32) + decay * weight
    speed = momentum * tl.load(momenta + at, inside) + gradient
    tl.store(momenta + at, speed, inside)
    if nesterov:
        speed = gradient + momentum * speed
    weight -= rate * speed
    tl.store(weights + at, weight, inside)
    if low:
        tl.store(copies + at, weight.to(tl.bfloat16), inside)


@triton.jit
def _update(  # type: ignore[no-untyped-def]
    table, owners, starts, sizes, rate, inertia, count, decay, nesterov: tl.constexpr, size: tl.constexpr
):
    """One block of one weight. `table` holds the addresses of weights, momenta, gradients and working copies.

    Whole blocks go without a mask, so that they are read and written sixteen bytes at a time.
    """
    block = tl.program_id(0)
    row = tl.load(owners + block)
    start = tl.load(starts + block)
    at = tl.multiple_of(start, size) + tl.arange(0, size)
    end = tl.load(sizes + row)
    inside = at < end
    whole = start + size <= end
    weights = tl.multiple_of(tl.load(table + row).to(tl.pointer_type(tl.float32)), 16)
    momenta = tl.multiple_of(tl.load(table + count + row).to(tl.pointer_type(tl.float32)), 16)
    address = tl.load(table + 2 * count + row)
    copied = tl.load(table + 3 * count + row)
    speed, momentum = tl.load(rate).to(tl.float32), tl.load(inertia).to(tl.float32)
    if copied != 0:
        low = tl.multiple_of(address.to(tl.pointer_type(tl.bfloat16)), 16)
        copies = tl.multiple_of(copied.to(tl.pointer_type(tl.bfloat16)), 16)
        if whole:
            _change(weights, momenta, low, copies, at, None, speed, momentum, decay, nesterov, True)
        else:
            _change(weights, momenta, low, copies, at, inside, speed, momentum, decay, nesterov, True)
    else:
        full = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
        if whole:
            _change(weights, momenta, full, weights, at, None, speed, momentum, decay, nesterov, False)
        else:
            _change(weights, momenta, full, weights, at, inside, speed, momentum, decay, nesterov, False)


class FusedSGD(SGD):
    """`SGD` in one kernel that reads and writes every weight once.

    The kernel finds its tensors by a table of addresses. In a captured step these are known while it is captured, but
    can be put into the table only afterwards: `finish_capture` does that.
    """

    def __init__(self, settings: recipe.Optimizer, weights: Sequence[Tensor], working: Sequence[Tensor]) -> None:
        super().__init__(settings, weights, working)
        self._tables: list[Tensor] = []
        self._free = 0
        self._pending: list[tuple[Tensor, list[list[int]]]] = []
        self._plans: dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor]] = {}

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None], rate: Tensor, momentum: Tensor) -> None:
        """Change the weights; those without a gradient stay."""
        rows = tuple(row for row, gradient in enumerate(gradients) if gradient is not None)
        laid: list[Tensor] = []
        addresses: list[list[int]] = [[], [], [], []]
        for row in rows:
            weight, working, speed = self.weights[row], self.working[row], self.momentum[row]
            gradient = gradients[row]
            assert gradient is not None
            gradient = gradient.to(working.dtype)
            if gradient.stride() != weight.stride() or gradient.data_ptr() % 16:
                gradient = torch.empty_like(working).copy_(gradient)
            laid.append(gradient)
            copied = 0 if working is weight else working.data_ptr()
            for column, address in zip(
                addresses, (weight.data_ptr(), speed.data_ptr(), gradient.data_ptr(), copied), strict=True
            ):
                column.append(address)
        owners, starts, sizes = self._plan(rows)
        if torch.cuda.is_current_stream_capturing():
            table = self._tables[self._free + len(self._pending)]
            self._pending.append((table, addresses))
        else:
            table = torch.tensor(addresses, dtype=torch.int64, device=rate.device)
        settings: Any = self.settings
        _update[(len(owners),)](
            table,
            owners,
            starts,
            sizes,
            rate,
            momentum,
            len(rows),
            settings.weight_decay,
            nesterov=settings.nesterov,
            size=_BLOCK,
            num_warps=8,
        )

    def begin_capture(self, steps: int) -> None:
        """Make room for the tables of so many steps, outside of the memory that the capture uses over and over."""
        shape, device = (4 * len(self.weights),), self.weights[0].device
        self._tables += [torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(steps)]
        self._free = len(self._tables) - steps
        self._pending.clear()  # of a capture that failed

    def finish_capture(self) -> None:
        """Fill the tables of the steps that were captured."""
        for table, addresses in self._pending:
            flat = torch.tensor(addresses, dtype=torch.int64).flatten()
            table[: len(flat)].copy_(flat)
        self._pending.clear()

    def _plan(self, rows: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        if rows not in self._plans:
            sizes = [self.weights[row].numel() for row in rows]
            blocks = [(owner, start) for owner, size in enumerate(sizes) for start in range(0, size, _BLOCK)]
            device = self.weights[0].device
            owners, starts = torch.tensor(blocks, device=device).unbind(1)
            self._plans[rows] = owners.contiguous(), starts.contiguous(), torch.tensor(sizes, device=device)
        return self._plans[rows]
