"""Which keys of a recipe decide the weights: the fingerprint of a recipe, and the differences between two."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from atas.recipes.schema import Recipe, section_types

# What may change between a run and its resume: where things are, and what is done after the training.
RESUME_MAY_CHANGE = (
    "engine.kind",
    "engine.device",
    "engine.precision",
    "engine.deterministic",
    "evaluation",
    "data.root",
    "data.loading",
    "data.workers",
    "method.store",
    "training.checkpoint_every",
    "training.loggers",
)


# Keys that came later, or did not count before, and what they stand for where they are not set. There they do not count
# in what tells runs from each other, so that checkpoints and results from before are found.
_LATER_DEFAULTS = {"data.view": "pad", "method.grid": None, "engine.sync_batchnorm": False}


def differences(one: Recipe, other: Recipe, ignore: Sequence[str] = ()) -> list[str]:
    """The dotted keys in which two recipes differ, with both values."""
    first, second = one.to_dict(), other.to_dict()
    found = []
    for section in section_types():
        for key in {**first[section], **second[section]}:
            if section in ignore or f"{section}.{key}" in ignore:
                continue
            a, b = first[section].get(key), second[section].get(key)
            if a != b:
                found.append(f"{section}.{key}: {a} became {b}")
    return found


def recipe_fingerprint(recipe: Recipe) -> str:
    """What tells a run from others: the same for the same recipe, but for what a resume may change."""
    return hashlib.sha256(repr(weight_keys(recipe.to_dict())).encode()).hexdigest()[:16]


def weight_keys(document: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of a recipe with nothing but what decides the weights."""
    found = {section: dict(entries) for section, entries in document.items() if section != "name"}
    for key in RESUME_MAY_CHANGE:
        section, _, name = key.partition(".")
        found[section] = {k: v for k, v in found[section].items() if name and k != name}
    for key, default in _LATER_DEFAULTS.items():
        section, _, name = key.partition(".")
        if found[section].get(name) == default:
            found[section].pop(name, None)
    return found
