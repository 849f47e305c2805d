"""Models by name: the built-in networks, those of timm, and a user's own factories."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, SupportsIndex

from torch import nn

from atas._utils.imports import current_directory_importable, describe_error, import_object, is_code, is_timm
from atas.core.arguments import check_argument
from atas.errors import AtasError, UsageError, unknown
from atas.models.layers import Normalize
from atas.models.preact_resnet import PreActResNet
from atas.models.resnet import BasicBlock, Bottleneck, ResNet
from atas.models.small_cnn import SmallCNN
from atas.models.timm_network import create_timm
from atas.models.wide_resnet import WideResNet

_FACTORIES: dict[str, Callable[[int, Normalize], nn.Module]] = {
    "preact-resnet18": PreActResNet,
    "preact-resnet18-ssat": partial(PreActResNet, activated_shortcut=True, last_bn=False),
    "preact-resnet18-yopo": partial(PreActResNet, activated_shortcut=True, last_bn=False),
    "preact-resnet18-gradalign": partial(PreActResNet, last_bn=False, he_init=True),
    "wrn-28-10": partial(WideResNet, depth=28, width=10),
    "resnet18": partial(ResNet, block=BasicBlock, blocks=(2, 2, 2, 2)),
    "resnet50": partial(ResNet, block=Bottleneck, blocks=(3, 4, 6, 3)),
    "small-cnn": SmallCNN,
}

_Constants = float | Sequence[float] | None
# Of the networks of other methods' authors, for three channels; all others normalise by ImageNet's.
_NORMALIZATION: dict[str, tuple[_Constants, _Constants]] = {
    "preact-resnet18-ssat": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),
    "preact-resnet18-yopo": (0.0, 1.0),
    "preact-resnet18-gradalign": (0.0, 1.0),
}


def names() -> list[str]:
    """Return the names of the built-in models.

    >>> "preact-resnet18" in names()
    True
    """
    return list(_FACTORIES)


def class_and_settings(name: str) -> tuple[type[nn.Module], dict[str, Any]]:
    """Return the class of a built-in model, and its arguments besides classes and normalisation.

    >>> class_and_settings("wrn-28-10")[1]
    {'depth': 28, 'width': 10}
    """
    factory = _get(name)
    network, settings = (factory.func, factory.keywords) if isinstance(factory, partial) else (factory, {})
    assert isinstance(network, type)
    return network, dict(settings)


def create(
    name: str,
    num_classes: int,
    channels: int = 3,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    *,
    size: Sequence[int] | None = None,
    options: Mapping[str, Any] | None = None,
    pretrained: bool = False,
    trusted: bool = True,
) -> nn.Module:
    """Create a freshly initialised model.

    Args:
        name: one of `names()`, `"timm:NAME"` for a network of timm, or `"package.module:function"` for a model of
            your own. The function is called as `function(num_classes=..., channels=...)` and returns an `nn.Module`
            that maps pixels in [0, 1] to logits; modules in the current directory are found too.
        num_classes: number of logits, at least 2.
        channels: channels of an image.
        mean: subtracted from the pixels inside the model, one number or one per channel. The default is
            ImageNet's for 3 channels, whatever the data set, as in the ATAS authors' code, and 0.5 otherwise; the
            networks of SSAT, YOPO and GradAlign have their authors' for 3 channels (YOPO and GradAlign: 0, std 1).
        std: divides them after that, in the same form; the default is ImageNet's or 0.25. A network of timm has
            defaults of its own.
        size: height and width of an image, which some networks of timm are built for.
        options: further arguments of a network of timm, such as `{"patch_size": 4}`.
        pretrained: download the weights that timm offers for its network.
        trusted: False for a name that a file of someone else gives: user code is then not imported.

    Weights that know nothing of the normalisation load strictly: the keys of `model.normalize` may be absent.

    >>> import torch
    >>> create("small-cnn", num_classes=10)(torch.rand(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    check_argument("name", name, str)
    factory = None if is_code(name) or is_timm(name) else _get(name)
    num_classes = _at_least(2, "num_classes", num_classes)
    channels = _at_least(1, "channels", channels)
    if is_timm(name):
        return create_timm(name, num_classes, channels, mean, std, size, options, pretrained)
    if pretrained or options:
        raise UsageError(f"pretrained and options are for networks of timm, such as timm:resnet50; got '{name}'")
    if factory is not None:
        return factory(num_classes, _normalize(name, channels, mean, std))
    if mean is not None or std is not None:
        raise UsageError(
            f"mean and std do not reach a model of your own ('{name}'); leave them out and normalise inside that model."
        )
    function = import_object(name, "model", "function", trusted=trusted)
    return _call_users(function, name, num_classes=num_classes, channels=channels)


def _call_users(function: Callable[..., object], name: str, num_classes: int, channels: int) -> nn.Module:
    """Call a user's own factory; say where its code failed."""
    with current_directory_importable():
        try:
            # Binding first tells a wrong signature from a TypeError in the body.
            inspect.signature(function).bind(num_classes=num_classes, channels=channels)
        except TypeError as error:
            raise UsageError(
                f"'{name}' cannot be called with the keyword arguments num_classes and channels ({error}); "
                "let it take exactly these two, or give the others defaults."
            ) from error
        except ValueError:  # a function of a C library states no signature
            pass
        try:
            model = function(num_classes=num_classes, channels=channels)
        except AtasError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise UsageError(f"'{name}' failed to make a model: {describe_error(error)}.") from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"'{name}' returned {type(model).__name__}; let it return a torch.nn.Module.")
    return model


def _get(name: str) -> Callable[[int, Normalize], nn.Module]:
    if name not in _FACTORIES:
        raise unknown("model", name, _FACTORIES)
    return _FACTORIES[name]


def _normalize(name: str, channels: int, mean: _Constants, std: _Constants) -> Normalize:
    """Return the first layer of a built-in model."""
    own_mean, own_std = _NORMALIZATION.get(name, (None, None)) if channels == 3 else (None, None)
    return Normalize(channels, own_mean if mean is None else mean, own_std if std is None else std)


def _at_least(minimum: int, argument: str, value: SupportsIndex) -> int:
    """Return the value as an int of at least `minimum`; numpy integers and integer tensors are accepted."""
    try:
        number = operator.index(value)
    except TypeError:
        number = minimum - 1
    if number < minimum:
        raise UsageError(f"{argument} is {value!r}; pass an integer of at least {minimum}.")
    return number
