"""Fast adversarial training with adaptive step sizes.

Everything that is meant for use from outside is here or one module down: `atas.methods`, `atas.models`, `atas.data`,
`atas.attacks`, `atas.export`.
"""

from __future__ import annotations

from atas import attacks, data, export, methods, models
from atas._version import __version__
from atas.augment import View, random_view
from atas.boxes import BoxView, random_crop_view, random_resized_view
from atas.data import indexed
from atas.errors import AtasError
from atas.evaluation import Evaluation, evaluate
from atas.export import load
from atas.methods import ATAS
from atas.threat import L2, Linf, Threat
from atas.training import Recipe, Run, train

__all__ = [
    "ATAS",
    "L2",
    "AtasError",
    "BoxView",
    "Evaluation",
    "Linf",
    "Recipe",
    "Run",
    "Threat",
    "View",
    "__version__",
    "attacks",
    "data",
    "evaluate",
    "export",
    "indexed",
    "load",
    "methods",
    "models",
    "random_crop_view",
    "random_resized_view",
    "random_view",
    "train",
]
