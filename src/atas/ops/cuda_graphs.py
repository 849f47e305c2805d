"""CUDA graphs, and work beside the main stream.

A captured function is replayed without the host. A `SideStream` overlaps work that is needed only later with the main
stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

R = TypeVar("R")

WARMUP_CALLS = 3


def warm_up(function: Callable[[], object], times: int = WARMUP_CALLS) -> None:
    """Call a function on another stream before its capture: libraries choose algorithms and allocate memory."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(times):
            function()
    torch.cuda.current_stream().wait_stream(stream)


def capture(function: Callable[[], R]) -> tuple[torch.cuda.CUDAGraph, R]:
    """Capture a function that was warmed up; return the graph, and the result that every replay overwrites."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


class GraphedFunction:
    """A function of tensors as a CUDA graph. The inputs of a call are copied to the memory that was captured."""

    def __init__(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
        self._inputs = [tensor.clone() for tensor in inputs]
        warm_up(lambda: function(*self._inputs), times=1)
        self._graph, self._output = capture(lambda: function(*self._inputs))

    def accepts(self, inputs: tuple[Tensor, ...]) -> bool:
        """Return whether the inputs have the shapes that were captured."""
        return [tensor.shape for tensor in inputs] == [tensor.shape for tensor in self._inputs]

    def __call__(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Replay the graph with these inputs."""
        for old, new in zip(self._inputs, inputs, strict=True):
            old.copy_(new)
        self._graph.replay()
        return self._output.clone()


class SideStream:
    """A second stream on every GPU for work that is needed only later. `wait` makes the main streams wait for it."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._kept: list[Tensor] = []
        self._keys: set[int] = set()

    @contextmanager
    def run(self, key: int, *inputs: Tensor) -> Iterator[None]:
        """Run the block on the side stream of the inputs' device, after all work queued so far. The inputs are kept
        alive until the main stream waits.

        If the same key was already used since the last `wait()`, run on the main stream instead: autograd sums the two
        gradients of a weight there, so both must be ready.
        """
        if key in self._keys:
            self._wait_for_streams()
            yield
            return
        device = inputs[0].device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(torch.cuda.current_stream(device))
        self._keys.add(key)
        self._kept += inputs
        with torch.cuda.stream(stream):
            yield

    def wait(self) -> None:
        """Make the main streams wait for the side streams; the host does not wait."""
        self._wait_for_streams()
        self._keys.clear()

    def _wait_for_streams(self) -> None:
        for device in {tensor.device for tensor in self._kept}:
            torch.cuda.current_stream(device).wait_stream(self._streams[device])
        self._kept.clear()


weight_grad_stream = SideStream()  # weight gradients: joined when a backward pass is over
