"""Copies between host and device beside the work of the main stream."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Copy(Protocol):
    """A copy that was begun."""

    def wait(self) -> None:
        """Hold the host until it is done."""

    def join(self) -> None:
        """Hold what is asked of the device from now on until it is done; the host goes on."""


class Copies(Protocol):
    """A way to copy."""

    def mark(self) -> Any:
        """This moment in the work of the device, for `after`."""

    def start(self, source: Tensor, target: Tensor, after: Any) -> Copy:
        """Begin to copy, once the device has come to that moment."""


def copies_for(device: torch.device) -> Copies:
    """How to copy to and from this device."""
    return StreamCopies(device) if device.type == "cuda" else PlainCopies()


class _Done:
    def wait(self) -> None:
        pass

    def join(self) -> None:
        pass


class PlainCopies:
    """Without a GPU: at once."""

    def mark(self) -> None:
        """Nothing is ever under way."""

    def start(self, source: Tensor, target: Tensor, after: None) -> Copy:
        """Copy."""
        target.copy_(source)
        return _Done()


class _StreamCopy:
    def __init__(self, done: torch.cuda.Event, device: torch.device) -> None:
        self._done, self._device = done, device

    def wait(self) -> None:
        self._done.synchronize()

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._done)


class StreamCopies:
    """On two streams beside the main one, so that rows that come do not queue behind rows that go."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._up, self._down = device, torch.cuda.Stream(device), torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        """An event on the main stream."""
        return torch.cuda.current_stream(self._device).record_event()

    def start(self, source: Tensor, target: Tensor, after: torch.cuda.Event) -> Copy:
        """Copy on the stream of this direction."""
        stream = self._up if target.is_cuda else self._down
        stream.wait_event(after)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return _StreamCopy(stream.record_event(), self._device)
