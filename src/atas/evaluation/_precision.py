"""Float32 that is float32: no TF32, no autocast, whatever the caller has switched on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_backends: Any = torch.backends  # PyTorch's own annotations leave out half of what is used here

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
def full_precision(device: torch.device) -> Iterator[None]:
    """Switch autocast and every short-cut of float32 off, and at the end back to what they were."""
    with torch.autocast(device.type, enabled=False), _ieee():
        yield


@contextlib.contextmanager
def _ieee() -> Iterator[None]:
    """PyTorch keeps two sets of switches, and complains where they contradict each other: so both are set. The old
    ones alone would not do, since their "off" means "as the parent says"."""
    old = _OldSwitches()
    new = _take_new()
    try:
        torch.set_float32_matmul_precision("highest")
        _backends.cudnn.allow_tf32 = False
        for setting in _OPERATIONS:
            setting.fp32_precision = "ieee"
        yield
    finally:
        old.restore()
        for setting, value in new:
            setting.fp32_precision = value


def _take_new() -> list[tuple[Any, str]]:
    """Every setting's own value, leaving "none". Parents come first: only below a parent of "none" does a setting
    show its own value rather than an inherited one."""
    found = []
    for setting in (*_PARENTS, *_OPERATIONS):
        found.append((setting, setting.fp32_precision))
        setting.fp32_precision = "none"
    return found


class _OldSwitches:
    """The older switches; where they contradict the new ones they cannot be read, and then stay off."""

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
