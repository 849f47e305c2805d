"""Networks of timm, an optional package, by name: `timm:resnet50`, `timm:vit_tiny_patch16_224`.

A name is looked up in timm's registry of networks, and options are plain values, so a file that names such a network
runs no code of its own. Sources that timm would download from (`hf-hub:...`) are no names here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from atas._utils.formatting import first_line
from atas._utils.imports import TIMM
from atas.errors import UsageError, unknown
from atas.models.layers import Normalize

# Arguments of timm.create_model that are no options of a network: what atas sets, and files and downloads.
_RESERVED = {
    "model_name",
    "num_classes",
    "in_chans",
    "checkpoint_path",
    "cache_dir",
    "scriptable",
    "exportable",
    "no_jit",
}


class TimmNetwork(nn.Module):
    """A network of timm behind the normalisation of its pixels.

    A state dict of the bare network, as timm's own programs save it, loads as well.
    """

    def __init__(self, network: nn.Module, normalize: Normalize) -> None:
        super().__init__()
        self.normalize = normalize
        self.timm = network

    def forward(self, x: Tensor) -> Tensor:
        """Logits of pixels in [0, 1]."""
        logits: Tensor = self.timm(self.normalize(x))
        return logits

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        complete = complete_names(self, state_dict, prefix)
        state_dict.clear()
        state_dict.update(complete)
        super()._load_from_state_dict(state_dict, prefix, *args)


def complete_names(model: nn.Module, tensors: Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Return tensors by their names in the model, of which those of a bare network of timm are only a part."""
    own = (f"{prefix}timm.", f"{prefix}normalize.")
    if not isinstance(model, TimmNetwork) or any(name.startswith(own[0]) for name in tensors):
        return dict(tensors)
    return {
        name if name.startswith(own[1]) or not name.startswith(prefix) else own[0] + name.removeprefix(prefix): value
        for name, value in tensors.items()
    }


def create_timm(
    name: str,
    num_classes: int,
    channels: int,
    mean: float | Sequence[float] | None = None,
    std: float | Sequence[float] | None = None,
    size: Sequence[int] | None = None,
    options: Mapping[str, Any] | None = None,
    pretrained: bool = False,
) -> TimmNetwork:
    """Create a network of timm, with its own mean and std by default; see `models.create`."""
    timm = _import_timm(name)
    network_name = name.removeprefix(TIMM)
    if not timm.is_model(network_name):
        raise unknown("network of timm", network_name, timm.list_models(), see="`timm.list_models()` lists them")
    options = dict(options or {})
    for key in options:
        if key in _RESERVED or key.startswith("pretrained"):
            raise UsageError(f"model.{key} is no option of a network of timm that a recipe may set; leave it out")
    try:
        config = timm.get_pretrained_cfg(network_name)
        if size is not None and getattr(config, "fixed_input_size", False):
            options.setdefault("img_size", tuple(size))
        network = timm.create_model(
            network_name, pretrained=pretrained, num_classes=num_classes, in_chans=channels, **options
        )
    except Exception as error:  # timm and its networks raise errors of all kinds
        remedy = "correct the options of [model]"
        if pretrained:
            remedy = "its weights are downloaded: connect to the network, or set model.weights to a file of weights"
        why = first_line(error).rstrip(".")
        raise UsageError(f"timm cannot build {network_name} ({why}); {remedy}") from error
    normalize = Normalize(
        channels,
        _constant(config, "mean", channels) if mean is None else mean,
        _constant(config, "std", channels) if std is None else std,
    )
    return TimmNetwork(network, normalize)


def _import_timm(name: str) -> ModuleType:
    try:
        import timm
    except Exception as error:  # a torchvision that was built for another torch raises a RuntimeError
        if isinstance(error, ModuleNotFoundError) and error.name == "timm":
            raise UsageError(f"the network {name} needs timm; install it with: pip install 'atas[timm]'") from error
        raise UsageError(
            f"the network {name} needs timm, which cannot be imported ({first_line(error)}); timm imports torchvision: "
            f"install the torchvision that belongs to torch {torch.__version__}"
        ) from error
    return timm


def _constant(config: Any, key: str, channels: int) -> tuple[float, ...] | float | None:
    """Return the mean or std that a network of timm was trained with, or their average for other channels."""
    values = getattr(config, key, None)
    if values is None:
        return None
    return tuple(values) if len(values) == channels else sum(values) / len(values)
