"""The recipe of each cell of a table: a method, a network and a budget on one data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from atas import recipes
from atas.paper import published
from atas.paper.study import StudyOptions, select, select_budgets
from atas.sweeps.trial import format_eps

CellRecipe = Callable[[str, str, float], tuple[str, dict[str, Any]] | None]

METHODS = ("pgd", "free", "yopo", "fgsm-rs", "fgsm-ga", "ssat", "atta", "atas")
EXTRA_METHODS = ("atas-literal", "fgsm-rs-adaptive", "fgsm", "standard", "trades")
ATTACKS = ("pgd10", "pgd50", "autoattack")


@dataclass(frozen=True)
class Grid:
    """The axes of a table.

    `cell` returns the recipe and its overridden values for a network, a method and a budget, or None for a cell that
    the paper left empty. `extra_methods` are run only if they are selected.
    """

    data: str
    networks: tuple[str, ...]
    budgets: tuple[float, ...]
    cell: CellRecipe
    methods: tuple[str, ...] = METHODS
    extra_methods: tuple[str, ...] = EXTRA_METHODS
    attacks: tuple[str, ...] = ATTACKS
    examples: int | None = None


def cifar(data: str, budgets: tuple[float, ...]) -> Grid:
    """Return the grid of the paper's CIFAR tables; every row has a recipe."""

    def cell(network: str, method: str, eps: float) -> tuple[str, dict[str, Any]] | None:
        name, known = f"{data}-{network}-{method}", recipes.names()
        exact = f"{name}-eps{format_eps(eps).removesuffix('/255')}"
        if exact in known:
            return exact, {}
        if name not in known:  # methods outside of the paper's tables do not have recipes for all cells
            name = f"cifar10-preact-resnet18-{method}"
            return name, {"data.name": data, "model.name": network, "method.eps": eps}
        return name, {"method.eps": eps}

    return Grid(data, ("preact-resnet18", "wrn-28-10"), budgets, cell)


_IMAGENET_SUFFIXES = {2: "", 4: "-eps4"}  # of the recipes' names, by budget


def imagenet() -> Grid:
    """Return the grid of the paper's ImageNet table; every row has a recipe."""

    def cell(network: str, method: str, eps: float) -> tuple[str, dict[str, Any]] | None:
        if published.lookup("imagenet", network, eps, method) is None:
            return None  # did not fit the authors' GPUs
        return f"imagenet-{network}-{method}{_IMAGENET_SUFFIXES[round(255 * eps)]}", {}

    return Grid(
        "imagenet",
        ("resnet18", "resnet50"),
        tuple(published.budgets("imagenet")),
        cell,
        methods=("free", "yopo", "fgsm-rs", "fgsm-ga", "atta", "atas"),
        extra_methods=(),
    )


QUICK_EPOCHS = 1 / 4  # of those of the recipe
QUICK_EPS = 0.25  # at the recipes' budget, 0.39, AutoAttack breaks all examples after so short a training
QUICK_EXAMPLES = 50


def digits() -> Grid:
    """Return a small grid on the embedded digits, which a CPU runs in a few minutes."""

    def cell(network: str, method: str, eps: float) -> tuple[str, dict[str, Any]] | None:
        name = f"digits-{network}-{method}"
        epochs = max(1, round(recipes.load(name).training.epochs * QUICK_EPOCHS))
        return name, {"training.epochs": epochs, "method.eps": eps}

    return Grid("digits", ("small-cnn",), (QUICK_EPS,), cell, examples=QUICK_EXAMPLES)


_CIFAR = ("cifar10", "cifar100")
_QUICK_BUDGETS = (0.6 * QUICK_EPS, QUICK_EPS, 1.4 * QUICK_EPS)


def all_cells(options: StudyOptions) -> Iterator[tuple[Grid, str, float]]:
    """Yield every cell as grid, network and budget; ImageNet only if its networks are selected."""
    if options.quick:
        grid = digits()
        for network in select("network", options.networks, grid.networks):
            yield from ((grid, network, eps) for eps in select_budgets(options.eps, _QUICK_BUDGETS))
        return
    small, large = [cifar(name, tuple(published.budgets(name))) for name in _CIFAR], imagenet()
    networks = select("network", options.networks, small[0].networks, large.networks)
    known = sorted({eps for grid in (*small, large) for eps in grid.budgets})
    budgets = select_budgets(options.eps, tuple(known))
    for grid in (*small, large):
        for network in (name for name in grid.networks if name in networks):
            yield from ((grid, network, eps) for eps in grid.budgets if eps in budgets)
