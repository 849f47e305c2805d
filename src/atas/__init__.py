"""Fast adversarial training with adaptive step sizes.

Everything that is meant for use from outside is here or one module down: `atas.methods`, `atas.models`, `atas.data`,
`atas.attacks`, `atas.export`.

Names are looked up on first use, so that `import atas`, and with it the help and the completion of the command, do not
wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"


if TYPE_CHECKING:
    from atas import attacks, data, export, methods, models
    from atas.autotrain import AutoTrainResult, robustify
    from atas.core.augment import View, random_view
    from atas.core.crop_shift import ShiftView, random_shift_view
    from atas.core.erasing import ErasedView, random_erasing
    from atas.core.resized_crop import BoxView, random_crop_view, random_resized_view
    from atas.data import indexed
    from atas.errors import AtasError
    from atas.evaluation import AccuracyCurve, Evaluation, accuracy_curve, evaluate
    from atas.export import load
    from atas.methods import ATAS
    from atas.threat import L2, Linf, Threat
    from atas.training import Monitor, MonitorStatus, Recipe, Run, train

__all__ = [
    "ATAS",
    "L2",
    "AccuracyCurve",
    "AtasError",
    "AutoTrainResult",
    "BoxView",
    "ErasedView",
    "Evaluation",
    "Linf",
    "Monitor",
    "MonitorStatus",
    "Recipe",
    "Run",
    "ShiftView",
    "Threat",
    "View",
    "__version__",
    "accuracy_curve",
    "attacks",
    "data",
    "evaluate",
    "export",
    "indexed",
    "load",
    "methods",
    "models",
    "random_crop_view",
    "random_erasing",
    "random_resized_view",
    "random_shift_view",
    "random_view",
    "robustify",
    "train",
]

# Where each name is found on first use; the imports above tell type checkers the same.
_HOMES = {
    "ATAS": "atas.methods",
    "L2": "atas.threat",
    "AccuracyCurve": "atas.evaluation",
    "AtasError": "atas.errors",
    "AutoTrainResult": "atas.autotrain",
    "BoxView": "atas.core.resized_crop",
    "ErasedView": "atas.core.erasing",
    "Evaluation": "atas.evaluation",
    "Linf": "atas.threat",
    "Monitor": "atas.training",
    "MonitorStatus": "atas.training",
    "Recipe": "atas.training",
    "Run": "atas.training",
    "ShiftView": "atas.core.crop_shift",
    "Threat": "atas.threat",
    "View": "atas.core.augment",
    "accuracy_curve": "atas.evaluation",
    "evaluate": "atas.evaluation",
    "indexed": "atas.data",
    "load": "atas.export",
    "random_crop_view": "atas.core.resized_crop",
    "random_erasing": "atas.core.erasing",
    "random_resized_view": "atas.core.resized_crop",
    "random_shift_view": "atas.core.crop_shift",
    "random_view": "atas.core.augment",
    "robustify": "atas.autotrain",
    "train": "atas.training",
}
# Packages that `import atas` makes available as attributes. `atas.cli` and `atas.ops` need an import of their own.
_MODULES = (
    "attacks",
    "autotrain",
    "core",
    "data",
    "distributed",
    "errors",
    "evaluation",
    "export",
    "methods",
    "models",
    "paper",
    "recipes",
    "report",
    "sweeps",
    "threat",
    "training",
)

if not TYPE_CHECKING:  # to a type checker, a name that is not imported above is an error

    def __getattr__(name):
        if name in _HOMES:
            return getattr(importlib.import_module(_HOMES[name]), name)
        if name in _MODULES:
            return importlib.import_module(f"atas.{name}")
        raise AttributeError(f"module 'atas' has no attribute '{name}'")


def __dir__() -> list[str]:
    of_every_module = (name for name in globals() if name.startswith("__"))
    return sorted({*of_every_module, *__all__, *_MODULES})
