"""Fingerprints of weights, data and models.

Results identify weights and data by short hashes. Logits of fixed images distinguish models with equal weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

_DIGITS = 16
LOGITS_KEY = "answers"  # in progress files
_TOLERANCE = 1e-3  # relative to the largest logit; another device may use another algorithm


def weights_hash(model: nn.Module) -> str:
    """Return the hash of a model's state."""
    return state_hash(model.state_dict())


def state_hash(state: Mapping[str, object]) -> str:
    """Return the short SHA-256 of the bytes of a state dict's tensors in the order of their keys.

    A wrapper that only adds a prefix to all keys does not change it.
    """
    digest = hashlib.sha256()
    for _, value in sorted(state.items()):
        if isinstance(value, Tensor):
            digest.update(_bytes(value))
    return digest.hexdigest()[:_DIGITS]


class DataHash:
    """The short SHA-256 of all images as float32 in [0, 1], then all labels as int64, updated batch by batch."""

    def __init__(self) -> None:
        self._images, self._labels = hashlib.sha256(), bytearray()

    def update(self, images: Tensor, labels: Tensor) -> None:
        """Add a batch."""
        self._images.update(_bytes(images.float()))
        self._labels += _bytes(labels.long())

    def hexdigest(self) -> str:
        """Return the hash of all batches so far."""
        digest = self._images.copy()
        digest.update(self._labels)
        return digest.hexdigest()[:_DIGITS]


def _bytes(tensor: Tensor) -> memoryview:
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def logits_fingerprint(verifier: Callable[[Tensor], Tensor], images: Tensor) -> list[float] | None:
    """Return the logits of the images as a list, or None if a second pass gives other logits."""
    with torch.no_grad():
        first, second = (verifier(images).nan_to_num().flatten().tolist() for _ in range(2))
    return first if same_logits(first, second) else None


def same_logits(a: list[float] | None, b: list[float] | None) -> bool:
    """Return whether two lists of logits are equal up to rounding.

    >>> same_logits([5.0, 1.0], [5.001, 1.0]), same_logits([5.0, 1.0], [5.1, 1.0]), same_logits(None, None)
    (True, False, True)
    """
    if a is None or b is None:
        return a is b
    tolerance = _TOLERANCE * max(map(abs, a), default=0.0)
    return len(a) == len(b) and all(abs(x - y) <= tolerance for x, y in zip(a, b, strict=True))
