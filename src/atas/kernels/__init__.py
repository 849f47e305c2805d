"""Kernels written by hand, for the networks that come with the package and for what surrounds them; CUDA alone."""

from __future__ import annotations

from atas._cache import keep_compiled
from atas.kernels._attacks import attack_functions
from atas.kernels._launch import side_by_side
from atas.kernels._networks import FusedForward, fused_forward, has_kernels
from atas.kernels._overlap import weights
from atas.kernels._small import small_functions

__all__ = [
    "FusedForward",
    "attack_functions",
    "fused_forward",
    "has_kernels",
    "side_by_side",
    "small_functions",
    "weights",
]

keep_compiled()
