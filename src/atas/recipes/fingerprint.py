"""The keys of a recipe that determine the weights: fingerprint of a recipe, and differences between two."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from atas import threat
from atas.recipes.schema import Recipe, section_types
from atas.threat import EpsMultiple, Threat

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
_LATER_DEFAULTS = {
    "data.view": "pad",
    "method.grid": None,
    "method.attack_mode": "auto",
    "method.write_back": True,
    "method.clamp": "both",
    "engine.sync_batchnorm": False,
    "training.probe_every": None,
}

# What "auto" stands for: the number of earlier versions, which large data sets still have.
_AUTOMATIC = {"training.probe": 1000}


def differences(one: Recipe, other: Recipe, ignore: Sequence[str] = ()) -> list[str]:
    """Return the dotted keys in which two recipes differ, with both values."""
    first, second = one.to_dict(), other.to_dict()
    first_sizes, second_sizes = _multiplied_out(first["method"]), _multiplied_out(second["method"])
    changed = []
    for section in section_types():
        one_section, other_section = first.get(section, {}), second.get(section, {})
        for key in {**one_section, **other_section}:
            if section in ignore or f"{section}.{key}" in ignore:
                continue
            a, b = one_section.get(key), other_section.get(key)
            same_size = section == "method" and first_sizes.get(key) == second_sizes.get(key)
            same_number = {a, b} == {"auto", _AUTOMATIC.get(f"{section}.{key}")}
            if a != b and not same_size and not same_number:
                changed.append(f"{section}.{key}: {a} became {b}")
    return changed


def recipe_fingerprint(recipe: Recipe) -> str:
    """Return a hash of the keys that determine the weights; keys that a resume may change are left out."""
    return hashlib.sha256(repr(weight_keys(recipe.to_dict())).encode()).hexdigest()[:16]


def weight_keys(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of a recipe with only the keys that determine the weights. A size such as "2 eps" counts as
    the number that it stands for."""
    sections = {section: dict(entries) for section, entries in document.items() if section != "name"}
    sections["method"] = _multiplied_out(sections["method"])
    for key in RESUME_MAY_CHANGE:
        section, _, name = key.partition(".")
        sections[section] = {k: v for k, v in sections[section].items() if name and k != name}
    for key, default in _LATER_DEFAULTS.items():
        section, _, name = key.partition(".")
        if sections[section].get(name) == default:
            sections[section].pop(name, None)
    for key, number in _AUTOMATIC.items():
        section, _, name = key.partition(".")
        if sections[section].get(name) == "auto":
            sections[section][name] = number
    if "weights_hash" in sections["model"]:  # says more than the path, which may change
        sections["model"].pop("weights", None)
    return sections


def _multiplied_out(method: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section [method] with multiples of eps as numbers."""
    budget = threat.create(method["norm"], method["eps"])
    return {key: _in_pixels(key, value, budget) for key, value in method.items()}


def _in_pixels(key: str, value: Any, budget: Threat) -> Any:
    if isinstance(value, tuple):
        return tuple(_in_pixels(key, item, budget) for item in value)
    return budget.size(key, value, auto=1) if isinstance(value, EpsMultiple) else value
