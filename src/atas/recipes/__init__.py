"""Recipes: the TOML files that come with the package, and the code that reads them.

A recipe holds everything that determines a run. Names are imported on first use, so that shell completion can list
recipes without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from atas.recipes.loading import find, load, names

if TYPE_CHECKING:
    from atas.recipes.fingerprint import differences, recipe_fingerprint
    from atas.recipes.schema import (
        DataConfig,
        EngineConfig,
        EvaluationConfig,
        MethodConfig,
        ModelConfig,
        OptimizerConfig,
        Recipe,
        ScheduleConfig,
        TargetsConfig,
        TrainingConfig,
        from_dict,
    )

__all__ = [
    "DataConfig",
    "EngineConfig",
    "EvaluationConfig",
    "MethodConfig",
    "ModelConfig",
    "OptimizerConfig",
    "Recipe",
    "ScheduleConfig",
    "TargetsConfig",
    "TrainingConfig",
    "differences",
    "find",
    "from_dict",
    "load",
    "names",
    "recipe_fingerprint",
]

_FINGERPRINT = ("differences", "recipe_fingerprint")

if not TYPE_CHECKING:  # type checkers must report names that are not imported above

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module 'atas.recipes' has no attribute '{name}'")
        home = "fingerprint" if name in _FINGERPRINT else "schema"
        return getattr(importlib.import_module(f"atas.recipes.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
