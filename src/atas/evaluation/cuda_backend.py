"""Fast searches on a GPU: the model in half precision, and steps as a CUDA graph.

Only the search uses half precision. The model itself gives every verdict in full precision. So half precision can make
a search miss an adversarial input, but it cannot give a wrong verdict. To miss as few as possible, half precision is
used only where predictions and the signs of input gradients agree with full precision on a sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from atas._utils.formatting import first_line
from atas.attacks.scheduler import Scheduler, Step
from atas.attacks.search import LogitsFunction
from atas.core.autograd import contiguous, input_gradient
from atas.core.dispatch import compile_function, use_fast_ops
from atas.ops import enable_kernels
from atas.ops.cuda_graphs import capture, warm_up
from atas.ops.networks import accelerate, takes_channels_last
from atas.ops.precision import low_precision_copy

# Both are equally fast; float16 has eight times the resolution, bfloat16 the larger range.
HALF_DTYPES = torch.float16, torch.bfloat16
_MIN_AGREEMENT = 0.98  # share of the images
# An attack steps along the sign of the gradient g. Along the signs of another gradient h, the loss rises by
# sum(g sign h) to first order, at most by sum |g|. The ratio is 1 for equal signs and 0 for random ones; a sign that is
# wrong where g is near zero hardly counts. A step at a ratio of 0.9 does as much as a step that is a tenth shorter, and
# searches make a hundred steps. Healthy networks are above: the mean over images is at least 0.995 in float16 and 0.956
# in bfloat16 (small CNNs trained on the digits, untrained preact-resnet18, resnet18 and wrn-28-10, on a CPU).
_MIN_RISE = 0.9


class _UnscaleGradient(torch.autograd.Function):
    """Identity whose backward pass undoes the scale of `_ScaleGradient`, in full precision."""

    @staticmethod
    def forward(ctx: Any, point: Tensor, scales: list[Tensor]) -> Tensor:
        """Return the point."""
        ctx.scales = scales
        return point.view_as(point)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Undo the scale."""
        return gradient.float() * ctx.scales.pop().view(-1, *(1,) * (gradient.dim() - 1)), None


class _ScaleGradient(torch.autograd.Function):
    """Conversion to float32 whose backward pass scales each example's gradient to about 1.

    Half precision has no numbers below 6e-8; the gradient of the cross-entropy at a confident prediction is smaller.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, scales: list[Tensor]) -> Tensor:
        """Return the logits in float32."""
        ctx.scales = scales
        return logits.float()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Scale by a power of two, which loses no precision."""
        largest = gradient.abs().amax(1, keepdim=True)
        usable = largest.isfinite() & (largest > 0)
        scale = torch.where(usable, largest, torch.ones_like(largest)).log2().floor().exp2()
        ctx.scales.append(scale)
        return gradient / scale, None


def half_precision(
    model: nn.Module,
    dtype: torch.dtype,
    batch: Tensor,
    *,
    memory_format: torch.memory_format,
    compile_whole: bool,
    log: Callable[[str], None],
) -> LogitsFunction:
    """Return a copy of the model in half precision, with gradients that do not underflow.

    The model is on a GPU, in eval mode, and does not change. `memory_format` is the layout in which the copy computes:
    contiguous or channels_last. `batch` has the shape of the batches to come: kernels are compiled for it. With
    `compile_whole`, a network without Triton kernels is compiled by torch.compile.
    """
    half_copy = low_precision_copy(model, dtype)
    for parameter in half_copy.parameters():
        if parameter.dim() == 4 and parameter.dtype == dtype:
            parameter.data = parameter.data.contiguous(memory_format=memory_format)

    def plain(x: Tensor) -> Tensor:
        logits: Tensor = half_copy(x.to(memory_format=memory_format))
        return logits

    network: LogitsFunction = plain
    if (accelerated := accelerate(half_copy, for_training=False)) is not None:
        network = accelerated
        accelerated.precompile(batch, modes=(False,))
    elif compile_whole:
        log("compiling the network to search with ...")
        with torch.autocast("cuda", dtype=dtype, cache_enabled=False):
            network = compile_network(plain, batch, log=log) or plain

    def search_model(point: Tensor) -> Tensor:
        scales: list[Tensor] = []
        with torch.autocast("cuda", dtype=dtype, cache_enabled=False):
            logits = network(_UnscaleGradient.apply(contiguous(point).float(), scales))
        return _ScaleGradient.apply(logits, scales)

    if accelerated is None:  # raises if a layer has no backward pass in half precision
        input_gradient(search_model, batch[:1], torch.zeros(1, dtype=torch.int64, device=batch.device))
    return search_model


def fastest_layout(model: nn.Module, images: Tensor, log: Callable[[str], None]) -> torch.memory_format:
    """Return the layout to search in: channels_last if the model can compute with it."""
    if takes_channels_last(model, images[:2].to(memory_format=torch.channels_last)):
        return torch.channels_last
    log(
        "the network does not compute the same with weights in channels_last, often because of view() in place of "
        "reshape(); the search does without, which is slower"
    )
    return torch.contiguous_format


def compile_network(
    network: LogitsFunction,
    batch: Tensor,
    backend: str = "inductor",
    log: Callable[[str], None] = lambda sentence: None,
) -> LogitsFunction | None:
    """Compile a network's forward and backward pass for any batch size; return None if that fails."""
    form = compile_function(network, backend, dynamic=None, log=log)

    def call(x: Tensor) -> Tensor:
        if len(x) == 1:  # torch.compile specialises on this size
            return network(x)
        torch._dynamo.maybe_mark_dynamic(x, 0)
        return form(x)

    point = batch.clone().requires_grad_()
    try:
        torch.autograd.grad(call(point).sum(), point)
        with torch.no_grad():
            call(batch)
    except Exception:  # a compiler may raise anything; the network runs without it
        return None
    return call


def find_disagreement(search_model: LogitsFunction, verifier: LogitsFunction, images: Tensor, size: int) -> str | None:
    """Return how a search model differs from the verifier on images, in batches of `size`; None if they agree.

    Logits and gradients must be finite. For 98% of the images the predictions must be equal, and a step along the signs
    of the input gradient must raise the loss by 90% of what it can, to first order. Images without a gradient in full
    precision do not count.
    """
    predictions, rises = [], []
    for x in images.split(size):
        with torch.no_grad():
            output, expected = search_model(x), verifier(x)
        if not bool(output.isfinite().all()):
            return "some logits are not finite"
        predictions.append(output.argmax(1) == expected.argmax(1))
        gradient, _ = input_gradient(verifier, x, expected.argmax(1))
        found, _ = input_gradient(search_model, x, expected.argmax(1))
        usable = gradient.isfinite().flatten(1).all(1) & gradient.flatten(1).any(1)
        gradient, found = gradient[usable].flatten(1), found[usable].flatten(1)
        if not bool(found.isfinite().all()):
            return "some input gradients are not finite"
        rises.append((gradient * found.sign()).sum(1) / gradient.abs().sum(1))
    if (same := _share(torch.cat(predictions))) < _MIN_AGREEMENT:
        return f"the prediction differs on {1 - same:.1%} of {len(images)} images"
    if (useful := _share(torch.cat(rises) >= _MIN_RISE)) < _MIN_AGREEMENT:
        return f"signs of the input gradient mislead an attack on {1 - useful:.1%} of {len(images)} images"
    return None


def _share(flags: Tensor) -> float:
    return float(flags.double().mean()) if len(flags) else 1.0


def search_in_half_precision(
    scheduler: Scheduler,
    images: Tensor,
    make_search_model: Callable[[torch.dtype], LogitsFunction],
    log: Callable[[str], None] = print,
) -> Scheduler:
    """Return the scheduler with the first half-precision model that agrees with the verifier on the images.

    If none agrees, or none can compute there and back, the search model stays as it is. `notes` say why.
    """
    for dtype in HALF_DTYPES:
        name = str(dtype).removeprefix("torch.")
        try:
            search_model = make_search_model(dtype)
            reason = find_disagreement(search_model, scheduler.verifier, images.to(scheduler.device), scheduler.slots)
        except (RuntimeError, TypeError, ValueError) as error:  # a layer that has no form in half precision
            if isinstance(error, torch.OutOfMemoryError):
                raise
            note = f"the network cannot compute in {name} ({first_line(error)}); searching without it"
        else:
            if reason is None:
                return replace(scheduler, search_model=search_model, precision=name)
            note = f"the network computes something else in {name} ({reason}); searching without it"
        log(note)
        scheduler = replace(scheduler, notes=(*scheduler.notes, note))
    return scheduler


def run_cuda_graph(step: Step) -> Callable[[int], None]:
    """Return a function that replays a step, captured as a CUDA graph, a given number of times.

    Triton kernels replace the operations around the network where they exist.
    """
    enable_kernels()
    with use_fast_ops():
        warm_up(step)
        graph, _ = capture(step)

    def times(count: int) -> None:
        for _ in range(count):
            graph.replay()

    return times
