"""SGD with momentum for all weights in one kernel, which also writes their low-precision copies.

The kernel finds its tensors through a table of addresses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _update_block(
    weights, momenta, gradients, copies, at, inside, rate, momentum, decay, nesterov: tl.constexpr, low: tl.constexpr
):
    """These entries of one weight, its momentum and its low-precision copy."""
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
def _update_kernel(
    table, owners, starts, sizes, rate, inertia, count, decay, nesterov: tl.constexpr, size: tl.constexpr
):
    """One block of one weight. `table` holds the addresses of weights, momenta, gradients and low-precision copies.

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
            _update_block(weights, momenta, low, copies, at, None, speed, momentum, decay, nesterov, True)
        else:
            _update_block(weights, momenta, low, copies, at, inside, speed, momentum, decay, nesterov, True)
    else:
        full = tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)
        if whole:
            _update_block(weights, momenta, full, weights, at, None, speed, momentum, decay, nesterov, False)
        else:
            _update_block(weights, momenta, full, weights, at, inside, speed, momentum, decay, nesterov, False)


class SGDUpdate:
    """The update of a list of weights as one kernel that reads and writes every weight once.

    `copies` are the tensors that the forward pass uses: the weights themselves, or copies of them in bfloat16. During
    the capture of a CUDA graph the addresses of the gradients become known, but the table can be filled only
    afterwards: `finish_capture` does that.
    """

    def __init__(self, weights: Sequence[Tensor], copies: Sequence[Tensor], momenta: Sequence[Tensor]) -> None:
        self._weights, self._copies, self._momenta = weights, copies, momenta
        self._tables: list[Tensor] = []
        self._free = 0
        self._pending: list[tuple[Tensor, list[list[int]]]] = []
        self._plans: dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor]] = {}

    @torch.no_grad()
    def step(
        self,
        gradients: Sequence[Tensor | None],
        rate: Tensor,
        momentum: Tensor,
        *,
        weight_decay: float,
        nesterov: bool,
    ) -> None:
        """Update the weights that have a gradient."""
        rows = tuple(row for row, gradient in enumerate(gradients) if gradient is not None)
        laid: list[Tensor] = []
        addresses: list[list[int]] = [[], [], [], []]
        for row in rows:
            weight, copy, momenta = self._weights[row], self._copies[row], self._momenta[row]
            gradient = gradients[row]
            assert gradient is not None
            gradient = gradient.to(copy.dtype)
            if gradient.stride() != weight.stride() or gradient.data_ptr() % 16:
                gradient = torch.empty_like(copy).copy_(gradient)
            laid.append(gradient)
            copied = 0 if copy is weight else copy.data_ptr()
            for column, address in zip(
                addresses, (weight.data_ptr(), momenta.data_ptr(), gradient.data_ptr(), copied), strict=True
            ):
                column.append(address)
        owners, starts, sizes = self._plan(rows)
        if torch.cuda.is_current_stream_capturing():
            table = self._tables[self._free + len(self._pending)]
            self._pending.append((table, addresses))
        else:
            table = torch.tensor(addresses, dtype=torch.int64, device=rate.device)
        _update_kernel[(len(owners),)](
            table,
            owners,
            starts,
            sizes,
            rate,
            momentum,
            len(rows),
            weight_decay,
            nesterov=nesterov,
            size=_BLOCK,
            num_warps=8,
        )

    def begin_capture(self, steps: int) -> None:
        """Allocate the tables of this many steps, outside the memory pool that the capture reuses."""
        shape, device = (4 * len(self._weights),), self._weights[0].device
        self._tables += [torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(steps)]
        self._free = len(self._tables) - steps
        self._pending.clear()  # of a capture that failed

    def finish_capture(self) -> None:
        """Fill the tables of the captured steps."""
        for table, addresses in self._pending:
            flat = torch.tensor(addresses, dtype=torch.int64).flatten()
            table[: len(flat)].copy_(flat)
        self._pending.clear()

    def _plan(self, rows: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        if rows not in self._plans:
            sizes = [self._weights[row].numel() for row in rows]
            blocks = [(owner, start) for owner, size in enumerate(sizes) for start in range(0, size, _BLOCK)]
            device = self._weights[0].device
            owners, starts = torch.tensor(blocks, device=device).unbind(1)
            self._plans[rows] = owners.contiguous(), starts.contiguous(), torch.tensor(sizes, device=device)
        return self._plans[rows]
