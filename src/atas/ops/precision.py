"""Numeric precision: low-precision copies of models, and float32 without shortcuts.

`low_precision_copy` prepares a model for mixed precision. `strict_float32` switches off TF32 and autocast, whatever the
caller has enabled; `no_cudnn_benchmark` switches off the search for the fastest convolution.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from atas.models.resnet import Stem

_backends: Any = torch.backends  # PyTorch's annotations lack half of these settings

# A setting of "none" follows its parent: an operation its back end, a back end the first of all. The one of mkldnn is
# not among them because assigning to it changes the first of all instead (seen in torch 2.11 and 2.13).
_PARENTS = (_backends, _backends.cudnn)
_OPERATIONS = (
    _backends.cuda.matmul,
    _backends.cudnn.conv,
    _backends.cudnn.rnn,
    _backends.mkldnn.matmul,
    _backends.mkldnn.conv,
    _backends.mkldnn.rnn,
)


@contextlib.contextmanager
def strict_float32(device: torch.device) -> Iterator[None]:
    """Disable autocast and TF32; restore the caller's settings at the end."""
    with torch.autocast(device.type, enabled=False), _ieee_float32():
        yield


@contextlib.contextmanager
def no_cudnn_benchmark() -> Iterator[None]:
    """Disable cuDNN's benchmark, which takes seconds for each new batch size, for passes that do not make up for it."""
    before, _backends.cudnn.benchmark = _backends.cudnn.benchmark, False
    try:
        yield
    finally:
        _backends.cudnn.benchmark = before


@contextlib.contextmanager
def _ieee_float32() -> Iterator[None]:
    """Set float32 to IEEE arithmetic in both of PyTorch's sets of switches: it raises an error if they contradict each
    other, and "off" in the old set alone means "as the parent setting"."""
    with _no_tf32_warning():
        old = _LegacySettings()
    new = _save_settings()
    try:
        with _no_tf32_warning():
            torch.set_float32_matmul_precision("highest")
            _backends.cudnn.allow_tf32 = False
        for setting in _OPERATIONS:
            setting.fp32_precision = "ieee"
        yield
    finally:
        with _no_tf32_warning():
            old.restore()
        for setting, value in new:
            setting.fp32_precision = value


@contextlib.contextmanager
def _no_tf32_warning() -> Iterator[None]:
    """Silence the advice of torch 2.9 to use the newer switches, which are set here as well."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings to control TF32", UserWarning)
        yield


def _save_settings() -> list[tuple[Any, str]]:
    """Return the own value of every setting, and set it to "none". Parents come first: only below a parent of "none"
    does a setting show its own value rather than an inherited one."""
    saved = []
    for setting in (*_PARENTS, *_OPERATIONS):
        saved.append((setting, setting.fp32_precision))
        setting.fp32_precision = "none"
    return saved


class _LegacySettings:
    """The older switches. If they contradict the new ones they cannot be read, and stay off."""

    def __init__(self) -> None:
        self._matmul: str | None = None
        self._cudnn: bool | None = None
        with contextlib.suppress(RuntimeError):
            self._matmul = torch.get_float32_matmul_precision()
        with contextlib.suppress(RuntimeError):
            self._cudnn = _backends.cudnn.allow_tf32

    def restore(self) -> None:
        if self._matmul is not None:
            torch.set_float32_matmul_precision(self._matmul)
        if self._cudnn is not None:
            _backends.cudnn.allow_tf32 = self._cudnn


_LAYERS: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    Stem,  # only moves its weights
)
_FORWARDS = {(layer.forward, getattr(layer, "_conv_forward", None)) for layer in _LAYERS}


def low_precision_copy(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return the model with the weights of its convolutions and linear layers in `dtype`; all other tensors are shared.

    Casting every weight in every forward pass, as autocast does, costs one kernel per layer and pass; a copy that
    the optimiser keeps up to date costs none. A weight that anything is computed from before it reaches the layer's
    kernel, as by spectral normalisation, stays as it is, and autocast casts the result.
    """
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    low_precision = copy.deepcopy(model, dict(shared))
    layers = {module: ("weight", "bias") for module in low_precision.modules() if _is_plain(module)}
    kept = [
        parameter
        for module in low_precision.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if name not in layers.get(module, ())
    ]
    cast: dict[int, nn.Parameter] = {}
    for module, names in layers.items():
        for name in names:
            parameter = module._parameters.get(name)
            if parameter is None or parameter.dtype != torch.float32 or any(parameter is other for other in kept):
                continue
            low = cast.setdefault(id(parameter), nn.Parameter(parameter.detach().to(dtype)))
            low.requires_grad_(parameter.requires_grad)
            module._parameters[name] = low
    return low_precision


def _is_plain(module: nn.Module) -> bool:
    """Return whether this layer hands its weight and bias to its kernel as they are."""
    kernel = (type(module).forward, getattr(type(module), "_conv_forward", None))
    return (
        isinstance(module, _LAYERS)
        and kernel in _FORWARDS
        and not vars(module).keys() & {"forward", "_conv_forward"}
        and not module._forward_pre_hooks
        and not parametrize.is_parametrized(module)
    )
