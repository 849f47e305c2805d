"""Prepare a model for evaluation: device, dtype, eval mode, input gradient, and how searches run on it.

Only this module chooses the search model, the verifier, the number of slots and the way steps are run. The
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
from atas.attacks.search import LogitsFunction
from atas.core.autograd import contiguous, freeze, set_mode
from atas.core.validation import MODEL_FAILED, check_logits, explain_model_errors
from atas.errors import UsageError, unknown
from atas.ops.networks import WrappedNetwork
from atas.ops.precision import no_cudnn_benchmark, strict_float32

PRECISIONS = ("auto", "float32")
COMPILE_ABOVE_QUERIES = 2_000_000  # forward passes that make up for the time of torch.compile
_PROBE_IMAGES = 16
_CUDA_POLL_INTERVAL = 10


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
    """Yield a scheduler for a model in eval mode and full precision, without gradients of its weights.

    The model's mode and flags and the settings of PyTorch are restored at the end.

    Args:
        model: the model, on `device`.
        device: the device of the slots and the batches.
        precision: precision of the search: `float32`, or `auto` for the fastest on the device. Only the verifier gives
            verdicts.
        slots: the maximum number of images at a time.
        images: a sample of the images to attack, on which the model is checked.
        queries: the expected number of forward passes, in images; from `COMPILE_ABOVE_QUERIES` on the network is
            compiled.
        log: called with a sentence before a long preparation.
    """
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)

    def verifier(point: Tensor) -> Tensor:
        return check_logits(model(contiguous(point)), len(point))

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
                compile_network=queries >= COMPILE_ABOVE_QUERIES,
                log=log,
            )
        yield scheduler


def _prepare_cuda(
    scheduler: Scheduler,
    model: nn.Module,
    images: Tensor,
    *,
    half_precision: bool,
    compile_network: bool,
    log: Callable[[str], None],
) -> Scheduler:
    """Return a scheduler that replays its steps as a CUDA graph and searches in half precision if that agrees."""
    from atas.evaluation import cuda_backend  # only useful on CUDA

    scheduler = replace(scheduler, run_steps=cuda_backend.run_cuda_graph, poll_interval=_CUDA_POLL_INTERVAL)
    if not half_precision:
        return scheduler
    batch = torch.empty(scheduler.slots, *images.shape[1:], device=scheduler.device)
    layout = cuda_backend.fastest_layout(model, batch, log)

    def search_model(dtype: torch.dtype) -> LogitsFunction:
        return cuda_backend.half_precision(
            model, dtype, batch, memory_format=layout, compile_whole=compile_network, log=log
        )

    return cuda_backend.search_in_half_precision(scheduler, images, search_model, log)


class _HookableNetwork(WrappedNetwork):
    """A scripted model as a module that takes hooks."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the model's output."""
        output: Tensor = self.model(x)
        return output


def hookable(model: nn.Module) -> nn.Module:
    """Return the model, or a scripted one in a module that takes hooks and shares its weights and mode."""
    return _HookableNetwork(model) if isinstance(model, torch.jit.ScriptModule) else model


def resolve_device(model: nn.Module, images: torch.device, requested: torch.device | str | None) -> torch.device:
    """Return the model's device, or the device of the images for a model without weights.

    Raise UsageError if `requested` is another one.
    """
    first = next(itertools.chain(model.parameters(), model.buffers()), None)
    model_device = images if first is None else first.device
    try:
        # A tensor's device has an index: "cuda" becomes "cuda:0".
        resolved = model_device if requested is None else torch.empty(0, device=requested).device
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device '{requested}' is not available: omit device to use the model's") from error
    if first is not None and resolved != model_device:
        raise UsageError(f"the model is on {model_device} and is never moved: move it with model.to('{resolved}')")
    return resolved


def device_context(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which a GPU is the current device, for streams, graphs and kernels."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def model_dtype(model: nn.Module) -> torch.dtype:
    """Return float64 if all weights are, else float32; raise UsageError for weights in half precision."""
    weights: list[Any] = list(model.parameters()) or list(model.buffers())
    dtypes = {tensor.dtype for tensor in weights if tensor.dtype.is_floating_point}
    if half := sorted(str(dtype) for dtype in dtypes - {torch.float32, torch.float64}):
        raise UsageError(f"the model has {half[0]} weights, but verdicts need float32: pass model.float()")
    return torch.float64 if dtypes == {torch.float64} else torch.float32


@contextmanager
def with_input_gradient(model: nn.Module, images: Tensor) -> Iterator[None]:
    """Check that the model accepts the images and does not modify them in place.

    If its output has no gradient with respect to the input, make it zero in this context: black-box attacks still work,
    and the gradient diagnostics report the problem.
    """
    point = images.clone()
    version = point._version
    with explain_model_errors(MODEL_FAILED.format(shape=tuple(images.shape[1:]))), torch.no_grad():
        check_logits(model(point), len(point))
    if point._version != version:
        raise UsageError(
            "the model modifies its input in place, which would change the images: start its forward with x = x.clone()"
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
