"""Short hashes by which a result names the weights and the data that it was measured on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

_DIGITS = 16


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
