"""Models by name: the built-in networks and a user's own factories."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, SupportsIndex

from torch import nn

from atas._utils.imports import create_from_factory
from atas.errors import UsageError, unknown
from atas.models.layers import Normalize
from atas.models.preact_resnet import PreActResNet
from atas.models.resnet import BasicBlock, Bottleneck, ResNet
from atas.models.small_cnn import SmallCNN
from atas.models.wide_resnet import WideResNet

_FACTORIES: dict[str, Callable[[int, Normalize], nn.Module]] = {
    "preact-resnet18": PreActResNet,
    "wrn-28-10": partial(WideResNet, depth=28, width=10),
    "resnet18": partial(ResNet, block=BasicBlock, blocks=(2, 2, 2, 2)),
    "resnet50": partial(ResNet, block=Bottleneck, blocks=(3, 4, 6, 3)),
    "small-cnn": SmallCNN,
}


def names() -> list[str]:
    """The built-in models.

    >>> names()
    ['preact-resnet18', 'wrn-28-10', 'resnet18', 'resnet50', 'small-cnn']
    """
    return list(_FACTORIES)


def class_and_settings(name: str) -> tuple[type[nn.Module], dict[str, Any]]:
    """The class of a built-in model, and the settings that it is called with besides classes and normalisation.

    >>> class_and_settings("wrn-28-10")[1]
    {'depth': 28, 'width': 10}
    """
    factory = _get(name)
    found, settings = (factory.func, factory.keywords) if isinstance(factory, partial) else (factory, {})
    assert isinstance(found, type)
    return found, dict(settings)


def create(
    name: str,
    num_classes: int,
    channels: int = 3,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
) -> nn.Module:
    """A freshly initialised model.

    Args:
        name: one of `names()`, or `"package.module:function"` for a model of your own. The function is
            called as `function(num_classes=..., channels=...)` and returns an `nn.Module` that maps pixels in
            [0, 1] to logits; modules in the current directory are found too.
        num_classes: number of logits, at least 2.
        channels: channels of an image.
        mean: subtracted from the pixels inside the model, one number or one per channel. The default is
            ImageNet's for 3 channels, whatever the data set, as in the ATAS authors' code, and 0.5 otherwise.
        std: divides them after that, in the same form; the default is ImageNet's or 0.25.

    Weights that know nothing of the normalisation load strictly: the keys of `model.normalize` may be absent.

    >>> import torch
    >>> create("small-cnn", num_classes=10)(torch.rand(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    factory = None if ":" in name else _get(name)
    num_classes = _at_least(2, "num_classes", num_classes)
    channels = _at_least(1, "channels", channels)
    if factory is not None:
        return factory(num_classes, Normalize(channels, mean, std))
    if mean is not None or std is not None:
        raise UsageError(
            f"mean and std do not reach a model of your own ('{name}'); leave them out and normalise inside that model."
        )
    return create_from_factory(name, num_classes=num_classes, channels=channels)


def _get(name: str) -> Callable[[int, Normalize], nn.Module]:
    if name not in _FACTORIES:
        raise unknown("model", name, _FACTORIES)
    return _FACTORIES[name]


def _at_least(minimum: int, argument: str, value: SupportsIndex) -> int:
    """The value as an int: numpy integers and one-element integer tensors, as read from labels, will do."""
    try:
        number = operator.index(value)
    except TypeError:
        number = minimum - 1
    if number < minimum:
        raise UsageError(f"{argument} is {value!r}; give an integer of at least {minimum}.")
    return number
