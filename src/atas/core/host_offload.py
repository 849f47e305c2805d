"""Per-example rows in host memory, copied to the device for the step that needs them.

A step finds its rows at a fixed address on the device, so a CUDA graph can contain it:

    host rows -> loading -> incoming -> rows on the device -> a step -> outgoing -> unloading -> host rows
              gather     copy        at its start                    copy        scatter

`loading` and `unloading` are small buffers in pinned memory, so copies run beside the steps. The rows themselves are
ordinary host memory. `HostOffload` decides what waits for what; a `Copier` makes the copies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class _Transfer:
    """The rows of a batch in transfer, and their copy."""

    index: Tensor
    copy: CopyHandle


class HostOffload:
    """Copies rows to the device and back, so that every step sees what earlier steps wrote.

    Each step calls `fetch`, works on `rows[:count]`, and calls `write_back`. `prefetch` may then start the copy of the
    next batch. It waits for rows that are still being written back only if the batch contains one of them, as happens
    when the first batch of an epoch shares an example with the last batch of the epoch before.
    """

    def __init__(self, host_rows: Tensor, device: torch.device, copier: Copier | None = None) -> None:
        self._host_rows, self.device = host_rows, device
        self._copier = copier or copier_for(device)
        self._in_flight = torch.zeros(
            len(host_rows), dtype=torch.bool
        )  # rows that a step changed and that are not back yet
        self._prefetched: _Transfer | None = None
        self._returning: _Transfer | None = None
        self._loaded: CopyHandle | None = None
        self._allocate(0)

    def prefetch(self, index: Tensor) -> None:
        """Start copying these rows to the device."""
        index = index.cpu()
        if bool(self._in_flight[index].any()):
            self.sync()
        if self._loaded is not None:
            self._loaded.wait()  # its source buffer is about to be overwritten
        if len(index) > len(self.rows):
            self.sync()
            self._allocate(len(index))
        loading, incoming = self._loading[: len(index)], self._incoming[: len(index)]
        torch.index_select(self._host_rows, 0, index, out=loading)
        self._loaded = self._copier.start(loading, incoming, after=self._free)
        self._prefetched = _Transfer(index, self._loaded)

    def fetch(self, index: Tensor) -> None:
        """Make the rows available on the device, fetching them now if they were not prefetched."""
        index = index.cpu()
        if self._prefetched is None or not torch.equal(self._prefetched.index, index):
            self.prefetch(index)
        transfer, self._prefetched = self._prefetched, None
        assert transfer is not None
        transfer.copy.stream_wait()
        self.rows[: len(index)].copy_(self._incoming[: len(index)])
        self._free = self._copier.record_event()

    def write_back(self, index: Tensor) -> None:
        """Start copying the rows back, after waiting for those of the step before."""
        index = index.cpu()
        self.sync()
        outgoing = self._outgoing[: len(index)]
        outgoing.copy_(self.rows[: len(index)])
        copy = self._copier.start(outgoing, self._unloading[: len(index)], after=self._copier.record_event())
        self._returning = _Transfer(index, copy)
        self._in_flight[index] = True
        if self._prefetched is not None and bool(self._in_flight[self._prefetched.index].any()):
            self.drop_prefetch()  # prefetched too early

    def sync(self) -> None:
        """Wait until every row is back on the host."""
        if self._returning is not None:
            index = self._returning.index
            self._returning.copy.wait()
            self._host_rows.index_copy_(0, index, self._unloading[: len(index)])
            self._in_flight[index] = False
            self._returning = None

    def drop_prefetch(self) -> None:
        """Discard prefetched rows, which may have changed since."""
        self._prefetched = None

    def _allocate(self, count: int) -> None:
        """Allocate buffers for batches of up to this size. No transfer may be in progress."""
        shape, dtype = (count, *self._host_rows.shape[1:]), self._host_rows.dtype
        self.rows, self._incoming, self._outgoing = (
            torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(3)
        )
        self._loading, self._unloading = (
            torch.zeros(shape, dtype=dtype, pin_memory=self.device.type == "cuda") for _ in range(2)
        )
        self._free = self._copier.record_event()  # after this event `incoming` may be overwritten


class CopyHandle(Protocol):
    """An asynchronous copy that was started."""

    def wait(self) -> None:
        """Block the host until the copy is done."""

    def stream_wait(self) -> None:
        """Make later work of the current stream wait for the copy; the host continues."""


class Copier(Protocol):
    """Starts copies between host and device."""

    def record_event(self) -> Any:
        """Record an event on the current stream, for `after`."""

    def start(self, source: Tensor, target: Tensor, after: Any) -> CopyHandle:
        """Start a copy once the event `after` has happened."""


def copier_for(device: torch.device) -> Copier:
    """Return the copier for this device."""
    return StreamCopier(device) if device.type == "cuda" else SyncCopier()


class _FinishedCopy:
    def wait(self) -> None:
        pass

    def stream_wait(self) -> None:
        pass


class SyncCopier:
    """Copies synchronously, for devices other than CUDA."""

    def record_event(self) -> None:
        """Do nothing: no copy is ever in progress."""

    def start(self, source: Tensor, target: Tensor, after: None) -> CopyHandle:
        """Copy at once."""
        target.copy_(source)
        return _FinishedCopy()


class _StreamCopy:
    def __init__(self, done: torch.cuda.Event, device: torch.device) -> None:
        self._done, self._device = done, device

    def wait(self) -> None:
        self._done.synchronize()

    def stream_wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._done)


class StreamCopier:
    """Copies on two CUDA streams, one for each direction, beside the main stream."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._up, self._down = device, torch.cuda.Stream(device), torch.cuda.Stream(device)

    def record_event(self) -> torch.cuda.Event:
        """Record an event on the main stream."""
        return torch.cuda.current_stream(self._device).record_event()

    def start(self, source: Tensor, target: Tensor, after: torch.cuda.Event) -> CopyHandle:
        """Start the copy on the stream of its direction."""
        stream = self._up if target.is_cuda else self._down
        stream.wait_event(after)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return _StreamCopy(stream.record_event(), self._device)
