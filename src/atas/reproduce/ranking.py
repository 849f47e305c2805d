"""The runs that rank training images by gradient norm: FGSM-RS and ATTA with the paper's steps, norms remembered."""

from __future__ import annotations

from atas.analysis.norms import FIXED
from atas.reproduce.figure_study import ObservedStudy
from atas.reproduce.grid import QUICK_EPS, Grid, cifar, digits
from atas.reproduce.observations import Tenths
from atas.reproduce.study import Request
from atas.reproduce.trial import Trial

EPS = 8 / 255
_TWINS = {"fgsm-rs": "fgsm-rs-adaptive", "atta": "atas-literal"}
_STEPS = {"fgsm-rs": 10 / 255, "atta": 4 / 255}
_QUICK_STEPS = {"fgsm-rs": QUICK_EPS, "atta": 0.5 * QUICK_EPS}
QUICK_EPOCHS = 8


def grid_of(request: Request) -> Grid:
    """The network and data that subsets are studied on."""
    return digits() if request.quick else cifar("cifar10", (EPS,))


def quick_values(request: Request) -> dict[str, int]:
    """Quick runs of these studies are many, so they are shorter."""
    return {"training.epochs": QUICK_EPOCHS} if request.quick else {}


def ranking(study: ObservedStudy, request: Request, method: str) -> Trial:
    """The run of a method that ranks; a twin with adaptive steps, held fixed, which remembers norms."""
    grid, eps = grid_of(request), QUICK_EPS if request.quick else EPS
    step = (_QUICK_STEPS if request.quick else _STEPS)[method]
    values = {f"method.{key}": value for key, value in FIXED.items()} | {"method.max_step": step}
    cell = (grid.networks[0], _TWINS[method], eps)
    return study.trial(request, grid, cell, (Tenths(),), values=values | quick_values(request))
