"""Fingerprints of weights, data and models.

Results name their weights and data by short hashes. The logits of a few images tell models with equal weights apart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

_DIGITS = 16
LOGITS_KEY = "answers"
_TOLERANCE = 1e-3  # of the largest; another device may compute by another algorithm


def weights_hash(model: nn.Module) -> str:
    """The hash of a model's state."""
    return state_hash(model.state_dict())


def state_hash(state: Mapping[str, object]) -> str:
    """SHA-256 over the bytes of a state dict's tensors in the order of their keys, shortened.

    A wrapper that only puts a prefix before all keys does not change it.
    """
    digest = hashlib.sha256()
    for _, value in sorted(state.items()):
        if isinstance(value, Tensor):
            digest.update(_bytes(value))
    return digest.hexdigest()[:_DIGITS]


class DataHash:
    """SHA-256 over all images as float32 in [0, 1], then all labels as int64, shortened; fed batch by batch."""

    def __init__(self) -> None:
        self._images, self._labels = hashlib.sha256(), bytearray()

    def update(self, images: Tensor, labels: Tensor) -> None:
        """Add a batch."""
        self._images.update(_bytes(images.float()))
        self._labels += _bytes(labels.long())

    def hexdigest(self) -> str:
        """The hash of all that was added."""
        digest = self._images.copy()
        digest.update(self._labels)
        return digest.hexdigest()[:_DIGITS]


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def logits_fingerprint(verifier: Callable[[Tensor], Tensor], images: Tensor) -> list[float] | None:
    """The logits, one after the other; None where they are others the second time, and so say nothing."""
    with torch.no_grad():
        found, again = (verifier(images).nan_to_num().flatten().tolist() for _ in range(2))
    return found if same_logits(found, again) else None


def same_logits(one: list[float] | None, other: list[float] | None) -> bool:
    """Whether they are the same but for rounding.

    >>> same_logits([5.0, 1.0], [5.001, 1.0]), same_logits([5.0, 1.0], [5.1, 1.0]), same_logits(None, None)
    (True, False, True)
    """
    if one is None or other is None:
        return one is other
    most = _TOLERANCE * max(map(abs, one), default=0.0)
    return len(one) == len(other) and all(abs(a - b) <= most for a, b in zip(one, other, strict=True))
