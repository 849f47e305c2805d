"""Searching at the speed of a GPU: the model in half precision, and steps recorded as a CUDA graph.

Only the search is done so. Every verdict is given by the model itself in full precision, so what half precision costs
is at most a point that the search passes by, never a wrong verdict.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from atas.attacks._lanes import Logits
from atas.attacks._queue import Step
from atas.fusing import compiled, fused
from atas.graphs import record, warm_up
from atas.twin import working_copy

HALVES = torch.float16, torch.bfloat16  # as fast; the first is eight times as fine, the second holds larger numbers
_AGREEMENT = 0.98


class _Enter(torch.autograd.Function):
    """The way in; on the way back, where `_Leave` has scaled a gradient, it is put right again, in full precision."""

    @staticmethod
    def forward(ctx: Any, point: Tensor, scales: list[Tensor]) -> Tensor:
        """The point itself."""
        ctx.scales = scales
        return point.view_as(point)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Undo the scale."""
        return gradient.float() * ctx.scales.pop().view(-1, *(1,) * (gradient.dim() - 1)), None


class _Leave(torch.autograd.Function):
    """The way out, in float32; on the way back each example's gradient is scaled to the middle of the range.

    Half precision holds nothing below 6e-8, and the gradient of a cross-entropy at a confident prediction is smaller.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, scales: list[Tensor]) -> Tensor:
        """The logits themselves."""
        ctx.scales = scales
        return logits.float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Scale by a power of two, which costs no precision."""
        largest = gradient.abs().amax(1, keepdim=True)
        usable = largest.isfinite() & (largest > 0)
        scale = torch.where(usable, largest, torch.ones_like(largest)).log2().floor().exp2()
        ctx.scales.append(scale)
        return gradient / scale, None


def half_precision(
    model: nn.Module, kind: torch.dtype, batch: Tensor, *, long: bool, say: Callable[[str], None]
) -> Logits:
    """A copy of the model that computes in this half precision, channels_last, with gradients that do not vanish.

    The model is on a GPU, in eval mode, and stays as it is. `batch` is of the shape that it will be asked about:
    kernels are compiled for it. For a long evaluation a network without kernels of ours is compiled as a whole.
    """
    twin = working_copy(model, kind)
    for parameter in twin.parameters():
        if parameter.dim() == 4 and parameter.dtype == kind:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)

    def plain(x: Tensor) -> Tensor:
        found: Tensor = twin(x.to(memory_format=torch.channels_last))
        return found

    network: Logits = plain

    from atas.kernels import FusedForward, has_kernels, side_by_side  # Triton comes with PyTorch for CUDA alone

    if has_kernels(twin):
        network = by_hand = FusedForward(twin)
        with side_by_side():
            by_hand.rehearse(batch, modes=(False,))
    elif long:
        say("compiling the network to search with ...")
        with torch.autocast("cuda", dtype=kind, cache_enabled=False):
            network = compiled_network(plain, batch) or plain

    def logits(point: Tensor) -> Tensor:
        scales: list[Tensor] = []
        with torch.autocast("cuda", dtype=kind, cache_enabled=False):
            found = network(_Enter.apply(point.float(), scales))
        return _Leave.apply(found, scales)

    return logits


def compiled_network(network: Logits, batch: Tensor, backend: str = "inductor") -> Logits | None:
    """A network by torch.compile, for any number of images, there and back; None where it cannot be compiled."""
    form = compiled(network, backend, dynamic=None)

    def call(x: Tensor) -> Tensor:
        if len(x) == 1:  # a size that compilers treat apart
            return network(x)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        return form(x)

    point = batch.clone().requires_grad_()
    try:
        torch.autograd.grad(call(point).sum(), point)
        with torch.no_grad():
            call(batch)
    except Exception:  # whatever stops a compiler: the network as it is will do
        return None
    return call


def agrees(logits: Logits, judge: Logits, x: Tensor) -> bool:
    """Whether half precision says what the model says of these images: finite logits, and nearly always one class."""
    with torch.no_grad():
        found, expected = logits(x), judge(x)
    same = (found.argmax(1) == expected.argmax(1)).float().mean()
    return bool(found.isfinite().all()) and float(same) >= _AGREEMENT


def recorded(step: Step) -> Callable[[int], None]:
    """A number of steps, replayed from a record of one: the host only asks for the next.

    What surrounds the network runs by kernels written by hand, where there are any for it.
    """
    from atas.kernels import attack_functions, small_functions  # Triton comes with PyTorch for CUDA alone

    with fused(None, by_hand={**small_functions(), **attack_functions()}):
        warm_up(step)
        graph, _ = record(step)

    def times(count: int) -> None:
        for _ in range(count):
            graph.replay()

    return times
