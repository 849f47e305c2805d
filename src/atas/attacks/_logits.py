"""When a model's output counts as right."""

from __future__ import annotations

from torch import Tensor

from atas.fusing import fusable


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
