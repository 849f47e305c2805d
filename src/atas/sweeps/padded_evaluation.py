"""Evaluation on padded images, as in the code that the authors released.

Their test loader shares the transform of the training loader, which pads an image by four black pixels on each side.
CIFAR's test images become 40 x 40, and attacks perturb the border too. The last feature map is 5 x 5 (10 x 10 in the
wide network), and a pooling window of 4 x 4 (8 x 8) covers only its upper left.

Some of the paper's accuracies may be of this evaluation. It is an option here; the default does not pad.
"""

from __future__ import annotations

import copy

import torch.nn.functional as F
from torch import nn

from atas.data import Split
from atas.models import PreActResNet, WideResNet

PADDING = 4
NOTE = (
    "The authors' released evaluation pads test images to 40 x 40, so some of the paper's figures may be of those; "
    "rows marked so are evaluated in that way, all others on the images as they are."
)
_WINDOW: dict[type[nn.Module], int] = {PreActResNet: 4, WideResNet: 8}  # side of the authors' last pooling window


def pad_split(split: Split, padding: int) -> Split:
    """Return the split with black pixels around its images."""
    if not padding:
        return split
    return Split(F.pad(split.images[:], (padding,) * 4), split.labels, split.classes)


def with_released_pooling(model: nn.Module) -> nn.Module:
    """Return a copy of the model with the fixed pooling window of the authors' networks.

    On images of 32 x 32 pixels the outputs are the same. Other networks are returned unchanged.
    """
    if not isinstance(model, PreActResNet | WideResNet):
        return model
    padded_model = copy.deepcopy(model)
    padded_model.window = _WINDOW[type(model)]
    return padded_model
