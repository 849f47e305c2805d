"""CUDA graphs: recording what a function asks of the device, to replay it without the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

R = TypeVar("R")

_WARM_UP = 3


def warm_up(function: Callable[[], object], times: int = _WARM_UP) -> None:
    """Call a function a few times beside the main stream, as recording it asks for: libraries choose and allocate."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(times):
            function()
    torch.cuda.current_stream().wait_stream(stream)


def record(function: Callable[[], R]) -> tuple[torch.cuda.CUDAGraph, R]:
    """A record of a function that has been warmed up, and the result that every replay writes anew."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result
