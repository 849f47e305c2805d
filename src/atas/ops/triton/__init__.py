"""Triton kernels for the package's networks and for the operations around them. They need CUDA.

Importing this package registers the kernels that replace functions marked `@fast_op`; `atas.core.dispatch.table` lists
them. The kernel of `atas.training.metrics.accumulate_metrics` is registered by the CUDA graph engine.
"""

from __future__ import annotations

from atas.ops import use_compile_cache
from atas.ops.triton import (
    apgd,
    attack_losses,
    augment,
    cross_entropy,
    fab,
    pgd,
    projected_step,
    search_state,
    square,
    targets,
)

__all__ = [
    "apgd",
    "attack_losses",
    "augment",
    "cross_entropy",
    "fab",
    "pgd",
    "projected_step",
    "search_state",
    "square",
    "targets",
]

use_compile_cache()
