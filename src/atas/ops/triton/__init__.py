"""Triton kernels for the package's networks and for the operations around them. They need CUDA.

`training_kernels` and `attack_kernels` map functions to the kernels that replace them inside `dispatch.use_fast_ops`.
A kernel takes the arguments of the function that it replaces. It returns NotImplemented for arguments that it does not
support: other threat models than Linf, images in other precisions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from atas.attacks import apgd as plain_apgd
from atas.attacks import fab as plain_fab
from atas.attacks import losses as plain_losses
from atas.attacks import projected_gradient_descent as plain_pgd
from atas.attacks import search as plain_search
from atas.attacks import square as plain_square
from atas.ops.compile_cache import use_compile_cache
from atas.ops.triton import apgd, attack_losses, augment, cross_entropy, fab, linf, pgd, search_state, square
from atas.ops.triton.launch import parallel_compile

__all__ = ["attack_kernels", "parallel_compile", "training_kernels"]

use_compile_cache()


@functools.cache
def training_kernels() -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """Return the kernel of each function of a training step that has one."""
    from atas import threat  # not at the top: `training` imports this package
    from atas.core import augment as plain_augment
    from atas.core import autograd, perturbations
    from atas.data import loader
    from atas.methods import atas, base
    from atas.training import metrics

    return {
        plain_augment.sample_view: augment.sample_view,
        loader.gather_views: augment.apply_view,
        threat.ascend: linf.ascend,
        threat.random_start: linf.random_start,
        base.projected_start: linf.load,
        perturbations.store_pixels: linf.store,
        atas.adaptive_step_and_store: linf.adaptive_step_and_store,
        autograd.cross_entropy: cross_entropy.cross_entropy,
        autograd.cross_entropy_sum: cross_entropy.cross_entropy_sum,
        metrics.accumulate_metrics: cross_entropy.accumulate,
    }


@functools.cache
def attack_kernels() -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """Return the kernel of each function of an attack's step that has one."""
    return {
        plain_search.random_start: search_state.initial_point,
        plain_losses.correct: attack_losses.correct,
        plain_pgd.pgd_update: pgd.step,
        plain_losses.attack_loss: attack_losses.attack_loss,
        plain_apgd.apgd_update: apgd.step,
        plain_square.linf_proposal: square.propose,
        plain_losses.margin: attack_losses.margin,
        plain_square.square_update: square.update_best,
        plain_losses.target_margin: attack_losses.target_margin,
        plain_fab.boundary_step: fab.boundary_step,
        plain_fab.fab_update: fab.update_best,
    }
