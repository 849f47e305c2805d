"""What a model says of a few images, to know it again: weights do not tell what is done with them."""

from __future__ import annotations

import torch
from torch import Tensor

from atas.attacks._lanes import Logits

ANSWERS = "answers"
_ROUNDING = 1e-3  # of the largest; another device may compute by another algorithm


def answers(judge: Logits, images: Tensor) -> list[float] | None:
    """The logits, one after the other; None where they are others the second time, and so say nothing."""
    with torch.no_grad():
        found, again = (judge(images).nan_to_num().flatten().tolist() for _ in range(2))
    return found if same_answers(found, again) else None


def same_answers(one: list[float] | None, other: list[float] | None) -> bool:
    """Whether they are the same but for rounding.

    >>> same_answers([5.0, 1.0], [5.001, 1.0]), same_answers([5.0, 1.0], [5.1, 1.0]), same_answers(None, None)
    (True, False, True)
    """
    if one is None or other is None:
        return one is other
    most = _ROUNDING * max(map(abs, one), default=0.0)
    return len(one) == len(other) and all(abs(a - b) <= most for a, b in zip(one, other, strict=True))
