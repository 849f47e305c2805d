"""Every data set, network and budget of the paper's tables, for figures that show them all."""

from __future__ import annotations

from collections.abc import Iterator

from atas.reproduce import paper
from atas.reproduce.grid import QUICK_EPS, Grid, cifar, digits
from atas.reproduce.studies.table_imagenet import STUDY as IMAGENET
from atas.reproduce.study import Request, chosen, chosen_budgets

_CIFAR = ("cifar10", "cifar100")
_QUICK = (0.6 * QUICK_EPS, QUICK_EPS, 1.4 * QUICK_EPS)


def cells(request: Request) -> Iterator[tuple[Grid, str, float]]:
    """A grid with a network and a budget of it; ImageNet, which not everybody has, where its networks are asked for."""
    if request.quick:
        grid = digits()
        for network in chosen("network", request.networks, grid.networks):
            yield from ((grid, network, eps) for eps in chosen_budgets(request.eps, _QUICK))
        return
    small, large = [cifar(name, tuple(paper.budgets(name))) for name in _CIFAR], IMAGENET.grid(request)
    networks = chosen("network", request.networks, small[0].networks, large.networks)
    known = sorted({eps for grid in (*small, large) for eps in grid.budgets})
    budgets = chosen_budgets(request.eps, tuple(known))
    for grid in (*small, large):
        for network in (name for name in grid.networks if name in networks):
            yield from ((grid, network, eps) for eps in grid.budgets if eps in budgets)
