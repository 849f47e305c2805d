"""What is looked at before a training begins."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from atas.attacks import checked_logits
from atas.data import Dataset
from atas.errors import AtasError, DataError, UsageError
from atas.noise import Purpose, seed_for
from atas.passes import mode


def check_model(model: nn.Module, data: Dataset) -> None:
    """Try the model on two images, before anything is trained or given up."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError("the model has no weights to train; set requires_grad on some")
    first = next(model.parameters())
    images = data.train.images[:2].to(first.device).float() / 255
    try:
        with mode(model, training=False), torch.no_grad():
            logits = checked_logits(model(images), len(images))
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, AtasError):
            raise
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"the model cannot take float32 images of shape {tuple(data.shape)}: {why}") from error
    if logits.shape[1] < data.num_classes:
        raise UsageError(f"the model has {logits.shape[1]} outputs for {data.num_classes} classes; give it more")


def split_probe(examples: int, probe: int, *, held_out: bool) -> tuple[Tensor, Tensor | None]:
    """Which training images the monitor attacks, the same in every run, and which are left to train on (None: all)."""
    generator = torch.Generator().manual_seed(seed_for(0, 0, Purpose.PROBE))
    order = torch.randperm(examples, generator=generator)
    if not held_out:
        return order[:probe].sort().values, None
    if probe >= examples:
        raise DataError(
            f"training.probe = {probe} images would be held out of {examples} in all; set a smaller training.probe"
        )
    return order[:probe].sort().values, order[probe:].sort().values
