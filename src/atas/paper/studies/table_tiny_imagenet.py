"""Tiny-ImageNet-200, which the paper does not have: what low-resolution perturbations cost on many real images."""

from __future__ import annotations

from typing import Any

from atas.paper.accuracy_table import AccuracyTable
from atas.paper.grid import Grid, digits

NETWORKS = ("preact-resnet18", "resnet18")
BUDGETS = (4 / 255, 8 / 255)
_GRIDS = {"atta-grid32": 32, "atta-grid16": 16, "atas-grid32": 32, "atas-grid16": 16}
_QUICK_GRIDS = {"atas-grid32": 4, "atas-grid16": 2}  # of images of 8 x 8 pixels
_METHODS = ("fgsm-rs", "atta", "atas", "atas-grid32", "atas-grid16")
_EXTRA = ("atta-grid32", "atta-grid16")


def _cell(network: str, method: str, eps: float) -> tuple[str, dict[str, Any]]:
    """Return the recipe of a method, and the grid of its perturbations if they are not full-size."""
    grid = {"method.grid": _GRIDS[method]} if method in _GRIDS else {}
    return f"tinyimagenet-{network}-{method.split('-grid')[0]}", {"method.eps": eps, **grid}


def _quick_grid() -> Grid:
    base = digits()

    def cell(network: str, method: str, eps: float) -> tuple[str, dict[str, Any]] | None:
        resolved = base.cell(network, method.split("-grid")[0], eps)
        grid = {"method.grid": _QUICK_GRIDS[method]} if method in _QUICK_GRIDS else {}
        return None if resolved is None else (resolved[0], {**resolved[1], **grid})

    return Grid("digits", base.networks, base.budgets, cell, _METHODS, (), base.attacks, base.examples)


STUDY = AccuracyTable(
    "table-tiny-imagenet",
    "Tiny-ImageNet-200: FGSM-RS, ATTA and ATAS, perturbations full-size and at 32 x 32 and 16 x 16, eps 4 and 8/255",
    "Tiny-ImageNet-200: perturbations at full size and at low resolution",
    Grid("tiny-imagenet", NETWORKS, BUDGETS, _cell, _METHODS, _EXTRA),
    _quick_grid(),
    notes=(
        "The paper has no Tiny-ImageNet. `resnet18` has ImageNet's stem. In the FastAT Benchmark (arXiv 2604.22853; "
        "PreActResNet-18, 8/255, 100 epochs, averaged weights, label smoothing, mean of 3 seeds) LIET has 19.88% under "
        "AutoAttack, PGD-AT with averaged weights 19.77% and N-FGSM 18.79%; those trainings took 8,000 to 29,000 s.",
    ),
)
