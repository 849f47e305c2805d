"""Which recipe is behind each cell of a table: a method, a network and a budget on one data set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from atas.reproduce.trial import level
from atas.training import recipe

Cell = Callable[[str, str, float], tuple[str, dict[str, Any]] | None]

METHODS = ("pgd", "free", "yopo", "fgsm-rs", "fgsm-ga", "ssat", "atta", "atas")
MORE = ("atas-literal", "fgsm-rs-adaptive", "fgsm", "standard", "trades")
ATTACKS = ("pgd10", "pgd50", "autoattack")


@dataclass(frozen=True)
class Grid:
    """The axes of a table. `cell` gives the recipe and what is changed in it for a network, a method and a budget, or
    None where the paper left the cell empty. `more` are methods that are shown where they are asked for."""

    data: str
    networks: tuple[str, ...]
    budgets: tuple[float, ...]
    cell: Cell
    methods: tuple[str, ...] = METHODS
    more: tuple[str, ...] = MORE
    attacks: tuple[str, ...] = ATTACKS
    examples: int | None = None


def cifar(data: str, budgets: tuple[float, ...]) -> Grid:
    """The paper's CIFAR tables; every row has a recipe."""

    def cell(network: str, method: str, eps: float) -> tuple[str, dict[str, Any]] | None:
        name, known = f"{data}-{network}-{method}", recipe.names()
        exact = f"{name}-eps{level(eps).removesuffix('/255')}"
        if exact in known:
            return exact, {}
        if name not in known:  # methods that are not in the paper's tables have recipes for some cells alone
            name = f"cifar10-preact-resnet18-{method}"
            return name, {"data.name": data, "model.name": network, "method.eps": eps}
        return name, {"method.eps": eps}

    return Grid(data, ("preact-resnet18", "wrn-28-10"), budgets, cell)


QUICK_EPOCHS = 1 / 4  # of those of the recipe
QUICK_EPS = 0.25  # at the recipes' own budget, 0.39, AutoAttack leaves nothing of networks that were trained so briefly
QUICK_EXAMPLES = 50
_STEPS = ("step_size", "max_step")


def digits() -> Grid:
    """The same on the embedded digits, cut down to what a CPU does in a few minutes."""

    def cell(network: str, method: str, eps: float) -> tuple[str, dict[str, Any]] | None:
        name = f"digits-{network}-{method}"
        base = recipe.load(name)
        steps = {
            f"method.{key}": round(value * eps / base.method.eps, 6)
            for key, value in base.method.settings.items()
            if key in _STEPS and isinstance(value, float)
        }
        epochs = max(1, round(base.training.epochs * QUICK_EPOCHS))
        return name, {"training.epochs": epochs, "method.eps": eps, **steps}

    return Grid("digits", ("small-cnn",), (QUICK_EPS,), cell, examples=QUICK_EXAMPLES)
