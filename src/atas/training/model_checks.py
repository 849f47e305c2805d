"""Try the model before training: outputs, gradients, a batch of one image and an empty batch."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from atas.core.augment import View
from atas.core.autograd import set_mode, to_float32
from atas.core.model_state import state_tensors
from atas.core.validation import MODEL_FAILED, check_logits, check_trainable, explain_model_errors
from atas.data import Dataset
from atas.data.loader import Batch
from atas.errors import AtasError, UsageError
from atas.methods import Method
from atas.ops.precision import no_cudnn_benchmark
from atas.training.engine import Engine

_EMPTY_BATCH = (
    "the model cannot take an empty batch, as a process gets at the end of an epoch ({why}); use "
    "x.flatten(1) rather than x.view(len(x), -1), or other data.shards or training.batch_size"
)

_SINGLE_IMAGE = (
    "the model cannot be trained on a single image, as a process gets in a batch ({why}); use another "
    "training.batch_size, whose remainder at the end of an epoch is not one image, or other data.shards"
)


_SMALL_VIEWS = (
    "the model cannot take images of {size} x {size}, as the training shows them first ({{why}}); leave out "
    "data.view_start and data.view_ramp, or set model.dynamic_img_size = true for a transformer of timm"
)

_STEP = "a training step of {method} in {precision} fails on this model: {{why}}{remedy}"


def check_single_image(model: nn.Module, data: Dataset, size: int | None) -> None:
    """Try the model in train mode on one image of this side: BatchNorm has no variance of a single value."""
    with explain_model_errors(_SINGLE_IMAGE):
        _train_mode_outputs(model, _first_images(model, data, 1)[..., :size, :size])


def check_small_views(model: nn.Module, data: Dataset, size: int) -> None:
    """Try the model on images of the side that a training begins with, which rises later."""
    x = _first_images(model, data, 2)[..., :size, :size]
    if len(x) > 1:  # BatchNorm has no variance of a single value
        with explain_model_errors(_SMALL_VIEWS.format(size=size)):
            check_logits(_train_mode_outputs(model, x), len(x))


def check_model(model: nn.Module, data: Dataset) -> int:
    """Try forward and backward passes on two images, before training starts or an earlier run is deleted.

    Return the number of outputs, of which a model may have more than there are classes.
    """
    check_trainable(model)
    state_tensors(model)
    x, y = _first_images(model, data, 2), data.train.labels[:2].long()
    with explain_model_errors(_failure_message(model, data)), set_mode(model, training=False), torch.enable_grad():
        logits = check_logits(model(x.requires_grad_(True)), len(x))
        if logits.shape[1] < data.num_classes:
            raise UsageError(f"the model has {logits.shape[1]} outputs for {data.num_classes} classes; give it more")
        if not bool(logits.isfinite().all()):
            raise UsageError(
                "the model's outputs are NaN or infinite before any training; look at its weights and at divisions, "
                "logarithms and roots in its forward()"
            )
        _check_gradients(model, x, F.cross_entropy(to_float32(logits), y.to(logits.device)))
        if len(x) > 1 and not isinstance(model, torch.jit.ScriptModule):  # functional_call does not take one
            check_logits(_train_mode_outputs(model, x.detach()), len(x))
    return int(logits.shape[1])


def _check_gradients(model: nn.Module, x: Tensor, loss: Tensor) -> None:
    """Raise UsageError unless gradients reach the images and at least one weight; no `.grad` is written."""
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, [x, *weights], allow_unused=True) if loss.requires_grad else (None,)
    missing = (
        "images" if gradients[0] is None else "weights" if all(gradient is None for gradient in gradients[1:]) else None
    )
    if missing is not None:
        raise UsageError(
            f"no gradient of the loss reaches the {missing} through the model; look for detach(), no_grad(), argmax or "
            f"rounding in its forward()"
        )


def check_empty_batch(model: nn.Module, data: Dataset) -> None:
    """Try the model on an empty batch."""
    with explain_model_errors(_EMPTY_BATCH), set_mode(model, training=False), torch.no_grad():
        check_logits(model(_first_images(model, data, 0)), 0)


def check_step(engine: Engine, method: Method, data: Dataset) -> None:
    """Try a training step on the first two images, as it will be made: in its precision, with all its derivatives.

    `method` was made for this trial alone. Weights, running statistics and random states stay.
    """
    x = _first_images(engine.model, data, 2)
    if len(x) < 2:  # BatchNorm has no variance of a single value
        return
    y = data.train.labels[:2].long().to(x.device)
    batch = Batch(x, y, torch.arange(2, device=x.device), View.centre(2, method.pad, x.device))
    method.start_epoch(0, engine.recipe.training.epochs)
    failed = functools.partial(_STEP.format, method=type(method).__name__)
    try:
        _try_step(engine.compute_model, method, batch, engine.precision())
    except AtasError:
        raise
    except Exception as error:
        with explain_model_errors(failed(precision="float32", remedy="")):
            _try_step(engine.model, method, batch, nullcontext())
        with explain_model_errors(failed(precision=engine.precision_name, remedy="; set engine.precision=float32")):
            raise error


def _try_step(model: nn.Module, method: Method, batch: Batch, precision: AbstractContextManager[object]) -> None:
    """Make a training step that leaves weights, running statistics and random states alone."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = [batch.x.device] if batch.x.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices), set_mode(model, training=True), precision, no_cudnn_benchmark():
            method.before_step(batch.index)
            with method.teach(model, batch.x):
                method.training_step(model, _TrialUpdate(model), batch)
            method.after_step(batch.index)
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


class _TrialUpdate:
    """An `Update` that computes gradients and leaves the weights alone."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.momentum = [None] * len(self.weights)

    def backward(self, loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Compute all gradients, and return those of `inputs`."""
        return self.weight_gradients(loss, *inputs)[1]

    def apply(self) -> None:
        """Do nothing."""

    def __call__(self, loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Call `backward`."""
        return self.backward(loss, *inputs)

    def total(self, *sums: Tensor) -> list[Tensor]:
        """Return the sums of this process; nothing is exchanged with others."""
        return [value.detach() for value in sums]

    def weight_gradients(
        self, loss: Tensor, *inputs: Tensor, summed: bool = False
    ) -> tuple[list[Tensor | None], tuple[Tensor, ...]]:
        """Return the gradients with respect to weights and inputs."""
        gradients = torch.autograd.grad(loss, [*self.weights, *inputs], allow_unused=True)
        return list(gradients[: len(self.weights)]), gradients[len(self.weights) :]

    def offset_weights(self, offsets: Sequence[Tensor | None]) -> AbstractContextManager[None]:
        """Return a context in which the weights stay where they are."""
        return nullcontext()


def _train_mode_outputs(model: nn.Module, x: Tensor) -> object:
    """Return the model's outputs in train mode; running statistics and random states stay."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with set_mode(model, training=True), torch.no_grad(), torch.random.fork_rng(devices=[]):
        return functional_call(model, buffers, (x,))


def _first_images(model: nn.Module, data: Dataset, images: int) -> Tensor:
    """Return the first training images on the model's device."""
    return data.train.images[:2][:images].to(next(model.parameters()).device).float() / 255


def _failure_message(model: nn.Module, data: Dataset) -> str:
    """Return the message for a model that raises, with a remedy if its precision may be the cause."""
    sentence = MODEL_FAILED.format(shape=tuple(data.shape))
    others = {parameter.dtype for parameter in model.parameters()} - {torch.float32}
    if not others:
        return sentence
    return f"{sentence}; its weights are {min(map(str, others))}: pass model.float()"
