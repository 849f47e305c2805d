"""Fast searches on a GPU: the model in half precision, and steps as a CUDA graph.

Only the search uses half precision. Every verdict is given by the model itself in full precision. So half precision can
make a search miss an adversarial point, but it cannot give a wrong verdict.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from atas.attacks.scheduler import Step
from atas.attacks.search import LogitsFunction
from atas.core.dispatch import compile_function, use_fast_ops
from atas.ops import enable_kernels
from atas.ops.cuda_graphs import capture, warm_up
from atas.ops.networks import accelerate
from atas.ops.precision import low_precision_copy

# Both are as fast; the first is eight times as fine, the second holds larger numbers.
HALF_DTYPES = torch.float16, torch.bfloat16
_MIN_AGREEMENT = 0.98


class _UnscaleGradient(torch.autograd.Function):
    """The way in; on the way back it undoes the scale of `_ScaleGradient`, in full precision."""

    @staticmethod
    def forward(ctx: Any, point: Tensor, scales: list[Tensor]) -> Tensor:
        """The point itself."""
        ctx.scales = scales
        return point.view_as(point)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Undo the scale."""
        return gradient.float() * ctx.scales.pop().view(-1, *(1,) * (gradient.dim() - 1)), None


class _ScaleGradient(torch.autograd.Function):
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
    model: nn.Module, dtype: torch.dtype, batch: Tensor, *, compile_whole: bool, log: Callable[[str], None]
) -> LogitsFunction:
    """A copy of the model that computes in this half precision, channels_last, with gradients that do not vanish.

    The model is on a GPU, in eval mode, and stays as it is. `batch` is of the shape that it will be asked about:
    kernels are compiled for it. For a long evaluation a network without kernels of ours is compiled as a whole.
    """
    twin = low_precision_copy(model, dtype)
    for parameter in twin.parameters():
        if parameter.dim() == 4 and parameter.dtype == dtype:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)

    def plain(x: Tensor) -> Tensor:
        found: Tensor = twin(x.to(memory_format=torch.channels_last))
        return found

    network: LogitsFunction = plain
    if (accelerated := accelerate(twin, for_training=False)) is not None:
        network = accelerated
        accelerated.precompile(batch, modes=(False,))
    elif compile_whole:
        log("compiling the network to search with ...")
        with torch.autocast("cuda", dtype=dtype, cache_enabled=False):
            network = compile_network(plain, batch) or plain

    def logits(point: Tensor) -> Tensor:
        scales: list[Tensor] = []
        with torch.autocast("cuda", dtype=dtype, cache_enabled=False):
            found = network(_UnscaleGradient.apply(point.float(), scales))
        return _ScaleGradient.apply(found, scales)

    return logits


def compile_network(network: LogitsFunction, batch: Tensor, backend: str = "inductor") -> LogitsFunction | None:
    """A network by torch.compile, for any number of images, there and back; None where it cannot be compiled."""
    form = compile_function(network, backend, dynamic=None)

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


def predictions_agree(search_model: LogitsFunction, verifier: LogitsFunction, x: Tensor) -> bool:
    """Whether half precision says what the model says of these images: finite logits, and nearly always one class."""
    with torch.no_grad():
        found, expected = search_model(x), verifier(x)
    same = (found.argmax(1) == expected.argmax(1)).float().mean()
    return bool(found.isfinite().all()) and float(same) >= _MIN_AGREEMENT


def run_cuda_graph(step: Step) -> Callable[[int], None]:
    """A number of steps, replayed from a record of one: the host only asks for the next.

    What surrounds the network runs by kernels written by hand, where there are any for it.
    """
    enable_kernels()
    with use_fast_ops():
        warm_up(step)
        graph, _ = capture(step)

    def times(count: int) -> None:
        for _ in range(count):
            graph.replay()

    return times
