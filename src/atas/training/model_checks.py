"""Try the model before training: outputs, gradients, a batch of one image and an empty batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from atas.core.autograd import set_mode, to_float32
from atas.core.model_state import state_tensors
from atas.core.validation import MODEL_FAILED, check_logits, explain_model_errors
from atas.data import Dataset
from atas.errors import UsageError

_EMPTY_BATCH = (
    "the model cannot take an empty batch, as a process gets at the end of an epoch ({why}); use "
    "x.flatten(1) rather than x.view(len(x), -1), or other data.shards or training.batch_size"
)

_SINGLE_IMAGE = (
    "the model cannot be trained on a single image, as a process gets in a batch ({why}); use another "
    "training.batch_size, whose remainder at the end of an epoch is not one image, or other data.shards"
)


def check_single_image(model: nn.Module, data: Dataset, size: int | None) -> None:
    """Try the model in train mode on one image of this side: BatchNorm has no variance of a single value."""
    with explain_model_errors(_SINGLE_IMAGE):
        _train_mode_outputs(model, _first_images(model, data, 1)[..., :size, :size])


def check_model(model: nn.Module, data: Dataset) -> None:
    """Try forward and backward passes on two images, before training starts or an earlier run is deleted."""
    state_tensors(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError("the model has no weights to train; set requires_grad on parameters")
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
    return f"{sentence}; its weights are {min(map(str, others))}: give model.float()"
