"""Prepare a model for evaluation: device, dtype, eval mode, input gradient, and how searches run on it.

This is the only place that chooses the search model, the verifier, the number of slots and the way steps are run. The
choice depends on the model, its device and the requested precision. Attacks and results know nothing of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from atas.attacks.scheduler import Scheduler
from atas.core.autograd import freeze, set_mode
from atas.core.validation import MODEL_FAILED, check_logits, explain_model_errors
from atas.errors import UsageError, unknown
from atas.ops.precision import strict_float32

PRECISIONS = ("auto", "float32")
_PROBE_IMAGES = 16  # images to probe a model with
_CUDA_POLL_INTERVAL = 10
_COMPILE_ABOVE_QUERIES = 2_000_000  # passes from which on it pays to make things ready at length


@contextmanager
def prepare(
    model: nn.Module,
    device: torch.device,
    *,
    precision: str,
    slots: int,
    images: Tensor,
    queries: int = 0,
    log: Callable[[str], None] = print,
) -> Iterator[Scheduler]:
    """Hold a model in eval mode, its weights without gradients, in full precision; all is put back at the end.

    `precision` is that of the search: `float32`, or `auto` for what is fastest on the device. Whatever it is, a
    verdict is given by the verifier alone. `images` are a few of those to come, `queries` is how often the model will
    be asked about an image at most.
    """
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)

    def verifier(point: Tensor) -> Tensor:
        return check_logits(model(point), len(point))

    sample = images[: min(slots, _PROBE_IMAGES)].to(device)
    with (
        set_mode(model, training=False),
        freeze(model),
        strict_float32(device),
        no_cudnn_benchmark(),
        with_input_gradient(model, sample),
    ):
        full = str(model_dtype(model)).removeprefix("torch.")
        scheduler = Scheduler(verifier, verifier, device, slots, precision=full)
        if device.type == "cuda" and full == "float32":
            scheduler = _prepare_cuda(
                scheduler,
                model,
                images,
                half_precision=precision == "auto",
                compile_network=queries >= _COMPILE_ABOVE_QUERIES,
                log=log,
            )
        yield scheduler


@contextmanager
def no_cudnn_benchmark() -> Iterator[None]:
    """Keep cuDNN from trying out all its algorithms, seconds for each new number of images; the verifier sees many."""
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _prepare_cuda(
    scheduler: Scheduler,
    model: nn.Module,
    images: Tensor,
    *,
    half_precision: bool,
    compile_network: bool,
    log: Callable[[str], None],
) -> Scheduler:
    """Steps recorded once and replayed, and the search in the first half precision that says what the model says."""
    from atas.evaluation import cuda_backend  # of no use elsewhere

    scheduler = replace(scheduler, run_steps=cuda_backend.run_cuda_graph, poll_interval=_CUDA_POLL_INTERVAL)
    if not half_precision:
        return scheduler
    batch = torch.empty(scheduler.slots, *images.shape[1:], device=scheduler.device)
    for dtype in cuda_backend.HALF_DTYPES:
        search_model = cuda_backend.half_precision(model, dtype, batch, compile_whole=compile_network, log=log)
        if cuda_backend.predictions_agree(search_model, scheduler.verifier, images.to(scheduler.device)):
            return replace(scheduler, search_model=search_model, precision=str(dtype).removeprefix("torch."))
    return scheduler


def resolve_device(model: nn.Module, images: torch.device, requested: torch.device | str | None) -> torch.device:
    """The model's device, which is where batches go; that of the images for a model without weights."""
    first = next(itertools.chain(model.parameters(), model.buffers()), None)
    model_device = images if first is None else first.device
    try:
        resolved = (
            model_device if requested is None else torch.empty(0, device=requested).device
        )  # "cuda" is then "cuda:0"
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"there is no device '{requested}' here: leave device out to use the model's") from error
    if first is not None and resolved != model_device:
        raise UsageError(f"the model lives on {model_device} and is never moved: move it with model.to('{resolved}')")
    return resolved


def device_context(device: torch.device) -> AbstractContextManager[object]:
    """Inside, this GPU is the one that streams, graphs and kernels are made on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def model_dtype(model: nn.Module) -> torch.dtype:
    """Float64 where the weights are, else float32; half precision is refused."""
    weights: list[Any] = list(model.parameters()) or list(model.buffers())
    found = {tensor.dtype for tensor in weights if tensor.dtype.is_floating_point}
    if short := sorted(str(dtype) for dtype in found - {torch.float32, torch.float64}):
        raise UsageError(f"the model holds {short[0]} weights, and evaluation is in float32: pass model.float()")
    return torch.float64 if found == {torch.float64} else torch.float32


@contextmanager
def with_input_gradient(model: nn.Module, images: Tensor) -> Iterator[None]:
    """Refuse a model that cannot take the images or writes into them.

    One whose output has no gradient gets one of zero while this lasts: attacks without gradients can be run on it, and
    the others are seen to stay where they are.
    """
    point = images.clone()
    version = point._version
    with explain_model_errors(MODEL_FAILED.format(shape=tuple(images.shape[1:]))), torch.no_grad():
        check_logits(model(point), len(point))
    if point._version != version:
        raise UsageError(
            "the model writes into its input, so it would change the images: let it begin with x = x.clone()"
        )
    if _has_gradient(model, point):
        yield
        return
    hook = model.register_forward_hook(lambda _, inputs, output: output + 0 * inputs[0].flatten(1).sum(1, keepdim=True))
    try:
        yield
    finally:
        hook.remove()


def _has_gradient(model: nn.Module, point: Tensor) -> bool:
    with torch.enable_grad():
        point = point.detach().requires_grad_(True)
        output = check_logits(model(point), len(point))
        if not output.requires_grad:
            return False
        (gradient,) = torch.autograd.grad(output.sum(), point, allow_unused=True)
    return gradient is not None
