"""What is asked of a model's output, and when it counts as right."""

from __future__ import annotations

from torch import Tensor

from atas.errors import UsageError
from atas.fusing import fusable


def checked_logits(output: object, examples: int) -> Tensor:
    """The model's output, if it is a row of logits an example."""
    if not isinstance(output, Tensor):
        raise UsageError(f"the model must return a tensor of logits (N, classes); got {type(output).__name__}")
    if output.dim() != 2 or len(output) != examples or output.shape[1] < 2:
        raise UsageError(
            f"the model must return logits of shape ({examples}, classes) with two classes or more for {examples} "
            f"images; got {tuple(output.shape)}"
        )
    return output


def correct(logits: Tensor, y: Tensor) -> Tensor:
    """Whether each prediction is the label; logits with a NaN predict nothing.

    >>> import torch
    >>> correct(torch.tensor([[2.0, 1.0], [2.0, 1.0], [float("nan"), 1.0]]), torch.tensor([0, 1, 0])).tolist()
    [True, False, False]
    """
    return _correct(logits, y)


@fusable
def _correct(logits: Tensor, y: Tensor) -> Tensor:
    return (logits.argmax(1) == y) & ~logits.isnan().any(1)
