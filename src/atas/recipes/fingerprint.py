"""The keys of a recipe that determine the weights: fingerprint of a recipe, and differences between two."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from atas.recipes.schema import Recipe, section_types

# Keys that may change when a run is resumed: paths, devices, and the evaluation after the training.
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


# Keys that were added later, with the value that older recipes stand for. With this value a key is no part of the
# fingerprint, so that older checkpoints and results keep theirs.
_LATER_DEFAULTS = {"data.view": "pad", "method.grid": None, "engine.sync_batchnorm": False}


def differences(one: Recipe, other: Recipe, ignore: Sequence[str] = ()) -> list[str]:
    """Return the dotted keys in which two recipes differ, with both values."""
    first, second = one.to_dict(), other.to_dict()
    changed = []
    for section in section_types():
        one_section, other_section = first.get(section, {}), second.get(section, {})
        for key in {**one_section, **other_section}:
            if section in ignore or f"{section}.{key}" in ignore:
                continue
            a, b = one_section.get(key), other_section.get(key)
            if a != b:
                changed.append(f"{section}.{key}: {a} became {b}")
    return changed


def recipe_fingerprint(recipe: Recipe) -> str:
    """Return a hash of the keys that determine the weights; keys that a resume may change are left out."""
    return hashlib.sha256(repr(weight_keys(recipe.to_dict())).encode()).hexdigest()[:16]


def weight_keys(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a recipe with only the keys that determine the weights."""
    sections = {section: dict(entries) for section, entries in document.items() if section != "name"}
    for key in RESUME_MAY_CHANGE:
        section, _, name = key.partition(".")
        sections[section] = {k: v for k, v in sections[section].items() if name and k != name}
    for key, default in _LATER_DEFAULTS.items():
        section, _, name = key.partition(".")
        if sections[section].get(name) == default:
            sections[section].pop(name, None)
    return sections
