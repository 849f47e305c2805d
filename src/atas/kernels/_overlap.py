"""Work beside the main stream, and where it comes together again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Overlap:
    """A second stream for what is needed only later. `join` makes the main stream wait for it."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None
        self._kept: list[Tensor] = []
        self._names: set[int] = set()

    @contextmanager
    def aside(self, name: int, *inputs: Tensor) -> Iterator[None]:
        """Run what is inside on the second stream, after all that was asked for so far. The inputs are kept alive
        until the streams join, so that nothing is written over them meanwhile.

        Where a network was passed through twice, a weight gets two gradients, and autograd adds them up itself on the
        main stream. So of two things with one name the second is not put aside, and waits for the first.
        """
        if name in self._names:
            self._wait()
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        self._names.add(name)
        self._kept += inputs
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Wait, on the device, for what was put aside."""
        self._wait()
        self._names.clear()

    def _wait(self) -> None:
        if self._kept:
            assert self._stream is not None
            torch.cuda.current_stream().wait_stream(self._stream)
            self._kept.clear()


weights = Overlap()  # weight gradients: joined when a backward pass is over
