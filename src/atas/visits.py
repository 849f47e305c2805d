"""Rows that live on the host and visit the device for the step that needs them.

A step finds its rows in one fixed place on the device, so that a recorded step finds them, too:

    host rows -> loading -> incoming -> rows on the device -> a step -> outgoing -> unloading -> host rows
              gather     copy        at its start                    copy        scatter

`loading` and `unloading` are small buffers in pinned memory, so copies run beside the steps; the rows themselves are
ordinary memory of the host. Copies are asynchronous; this module is about what must wait for what, and `copies.py`
about how a copy is made.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from atas.copies import Copies, Copy, copies_for


@dataclass(frozen=True)
class _Trip:
    """The rows of a batch under way, and the copy that they are in."""

    index: Tensor
    copy: Copy


class Visits:
    """Brings rows to the device and back, in an order in which no step misses what an earlier one wrote.

    Each step calls `arrive`, does its work on `rows[:count]`, and calls `leave`. Then `prefetch` may announce the next
    batch: it waits for rows that are on their way back only where the batch has one of those, as happens when an
    epoch's first batch shares an example with the last one before it.
    """

    def __init__(self, home: Tensor, device: torch.device, copies: Copies | None = None) -> None:
        self._home, self.device = home, device
        self._copies = copies or copies_for(device)
        self._away = torch.zeros(len(home), dtype=torch.bool)  # rows that a step changed and that are not home yet
        self._coming: _Trip | None = None
        self._going: _Trip | None = None
        self._loaded: Copy | None = None
        self._make_room(0)

    def prefetch(self, index: Tensor) -> None:
        """Begin to bring these rows."""
        index = index.cpu()
        if bool(self._away[index].any()):
            self.settle()
        if self._loaded is not None:
            self._loaded.wait()  # what it reads is about to be overwritten
        if len(index) > len(self.rows):
            self.settle()
            self._make_room(len(index))
        loading, incoming = self._loading[: len(index)], self._incoming[: len(index)]
        torch.index_select(self._home, 0, index, out=loading)
        self._loaded = self._copies.start(loading, incoming, after=self._free)
        self._coming = _Trip(index, self._loaded)

    def arrive(self, index: Tensor) -> None:
        """The rows are in place for what the device does next; brought now where they were not announced."""
        index = index.cpu()
        if self._coming is None or not torch.equal(self._coming.index, index):
            self.prefetch(index)
        trip, self._coming = self._coming, None
        assert trip is not None
        trip.copy.join()
        self.rows[: len(index)].copy_(self._incoming[: len(index)])
        self._free = self._copies.mark()

    def leave(self, index: Tensor) -> None:
        """Begin to take the rows back. Waits for those of the step before, while the device is busy with this one."""
        index = index.cpu()
        self.settle()
        outgoing = self._outgoing[: len(index)]
        outgoing.copy_(self.rows[: len(index)])
        copy = self._copies.start(outgoing, self._unloading[: len(index)], after=self._copies.mark())
        self._going = _Trip(index, copy)
        self._away[index] = True
        if self._coming is not None and bool(self._away[self._coming.index].any()):
            self.forget()  # announced too early

    def settle(self) -> None:
        """Wait until every row that left is home."""
        if self._going is not None:
            index = self._going.index
            self._going.copy.wait()
            self._home.index_copy_(0, index, self._unloading[: len(index)])
            self._away[index] = False
            self._going = None

    def forget(self) -> None:
        """What was announced is not used: it may have changed since."""
        self._coming = None

    def _make_room(self, count: int) -> None:
        """Buffers for batches of up to this size. Nothing may be under way."""
        shape, dtype = (count, *self._home.shape[1:]), self._home.dtype
        self.rows, self._incoming, self._outgoing = (
            torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(3)
        )
        self._loading, self._unloading = (
            torch.zeros(shape, dtype=dtype, pin_memory=self.device.type == "cuda") for _ in range(2)
        )
        self._free = self._copies.mark()  # from when on `incoming` may be overwritten
