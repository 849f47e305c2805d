"""What attacks count on and two passes show: a model takes images, leaves them alone, and has a gradient there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from atas.checks import CANNOT_TAKE, checked_logits, trying
from atas.errors import UsageError


@contextmanager
def probed(model: nn.Module, images: Tensor) -> Iterator[None]:
    """Refuse a model that cannot take the images or writes into them.

    One whose output has no gradient gets one of zero while this lasts: attacks without gradients can be run on it, and
    the others are seen to stay where they are.
    """
    point = images.clone()
    version = point._version
    with trying(CANNOT_TAKE.format(shape=tuple(images.shape[1:]))), torch.no_grad():
        checked_logits(model(point), len(point))
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
        output = checked_logits(model(point), len(point))
        if not output.requires_grad:
            return False
        (gradient,) = torch.autograd.grad(output.sum(), point, allow_unused=True)
    return gradient is not None
