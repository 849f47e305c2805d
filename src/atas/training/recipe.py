"""Recipes: everything that decides how a run goes, in one TOML file.

A recipe may begin from another with `extends = "name"` and state only what differs. What is saved with a run is the
resolved recipe, complete and without `extends`; running that file again gives the same run.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from atas import _catalogue, methods, threat
from atas.errors import UsageError, nearest, unknown
from atas.training._recipe_checks import check
from atas.training.sections import Data, Engine, Evaluation, Method, Model, Optimizer, Schedule, Training
from atas.training.values import convert, to_toml

S = TypeVar("S")

# What may change between a run and its resume: where things are, and what is done after the training.
MAY_CHANGE = (
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
_CAME_LATER = {"data.view": "pad", "method.grid": None, "engine.sync_batchnorm": False}


# What other programs call a key.
_OTHER_NAMES = {"lr": "schedule.peak", "learning_rate": "schedule.peak"}


@dataclass(frozen=True)
class Recipe:
    """A whole recipe; see the sections."""

    name: str = "unnamed"
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    method: Method = field(default_factory=Method)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    training: Training = field(default_factory=Training)
    engine: Engine = field(default_factory=Engine)
    evaluation: Evaluation = field(default_factory=Evaluation)

    def __post_init__(self) -> None:
        check(self)

    @property
    def threat(self) -> threat.Threat:
        """The threat model that the method trains against."""
        return threat.create(self.method.norm, self.method.eps)

    def with_values(self, values: Mapping[str, Any]) -> Recipe:
        """The recipe with other values, by dotted keys such as `training.epochs`."""
        document = self.to_dict()
        for key in sorted(values, key=lambda key: key not in ("method.name", "model.name")):  # their settings follow
            _assign(document, key, values[key])
        return from_dict(document, self.name)

    def to_dict(self) -> dict[str, Any]:
        """Sections as dictionaries, without what is not set."""
        document: dict[str, Any] = {"name": self.name}
        for section in _sections():
            values = dataclasses.asdict(getattr(self, section))
            own = values.pop("settings", {})
            document[section] = {key: value for key, value in values.items() if value is not None} | own
        return document

    def to_toml(self) -> str:
        """The recipe as a file that gives this recipe again."""
        lines = [f"name = {to_toml(self.name)}"]
        for section in _sections():
            lines += ["", f"[{section}]"]
            entries = self.to_dict()[section].items()
            lines += [f"{key} = {to_toml(value, levels=section == 'method')}" for key, value in entries]
        return "\n".join(lines) + "\n"


def names() -> list[str]:
    """The recipes that come with the package."""
    return _catalogue.recipes()


def load(source: str | Path | Recipe) -> Recipe:
    """A recipe by name or path.

    >>> load("cifar10-preact-resnet18-atas").method.name
    'atas'
    """
    if isinstance(source, Recipe):
        return source
    if not isinstance(source, str | Path):
        raise UsageError(f"a recipe is given by its name, its path or as a Recipe; got {type(source).__name__}")
    document, name = _read(source, ())
    return from_dict(document, name)


def from_dict(document: Mapping[str, Any], name: str) -> Recipe:
    """A recipe from sections as dictionaries; an unknown key is an error that names the nearest known one."""
    known = _sections()
    values: dict[str, Any] = {"name": str(document.get("name", name))}
    for section, entries in document.items():
        if section == "name":
            continue
        if section not in known:
            raise unknown("section of a recipe", section, known)
        if not isinstance(entries, Mapping):
            raise UsageError(f"'{section}' in a recipe is a section: write [{section}] and its keys below")
        values[section] = _section(known[section], section, entries)
    return Recipe(**values)


def differences(one: Recipe, other: Recipe, ignore: Sequence[str] = ()) -> list[str]:
    """The dotted keys in which two recipes differ, with both values."""
    first, second = one.to_dict(), other.to_dict()
    found = []
    for section in _sections():
        for key in {**first[section], **second[section]}:
            if section in ignore or f"{section}.{key}" in ignore:
                continue
            a, b = first[section].get(key), second[section].get(key)
            if a != b:
                found.append(f"{section}.{key}: {a} became {b}")
    return found


def fingerprint(recipe: Recipe) -> str:
    """What tells a run from others: the same for the same recipe, but for what a resume may change."""
    return hashlib.sha256(repr(deciding(recipe.to_dict())).encode()).hexdigest()[:16]


def deciding(document: Mapping[str, Any]) -> dict[str, Any]:
    """The sections of a recipe with nothing but what decides the weights."""
    found = {section: dict(entries) for section, entries in document.items() if section != "name"}
    for key in MAY_CHANGE:
        section, _, name = key.partition(".")
        found[section] = {k: v for k, v in found[section].items() if name and k != name}
    for key, usual in _CAME_LATER.items():
        section, _, name = key.partition(".")
        if found[section].get(name) == usual:
            found[section].pop(name, None)
    return found


def _read(source: str | Path, seen: tuple[str, ...]) -> tuple[dict[str, Any], str]:
    name, identity, content = _catalogue.find_recipe(source)
    if identity in seen:
        circle = " -> ".join(Path(place).stem for place in (*seen, identity))
        raise UsageError(f"recipe '{name}' extends itself: {circle}")
    try:
        document = tomllib.loads(content.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"recipe {source} is not valid TOML: {error}") from error
    if not document.keys() - {"name"}:
        raise UsageError(
            f'recipe {source} is empty; begin it from another, such as extends = "cifar10-preact-resnet18-atas"'
        )
    base = document.pop("extends", None)
    if base is None:
        return document, name
    if not isinstance(base, str):
        raise UsageError(f"'extends' in recipe {source} must be the name of one recipe; got {base!r}")
    merged, _ = _read(Path(source).parent / base if base.endswith(".toml") else base, (*seen, identity))
    merged.pop("name", None)
    for section, entries in document.items():
        if isinstance(entries, dict) and isinstance(merged.get(section), dict):
            merged[section] = _kept(section, merged[section], entries.get("name")) | entries
        else:
            merged[section] = entries
    return merged, name


def _kept(section: str, entries: dict[str, Any], name: Any) -> dict[str, Any]:
    """What stays of a section when the name in it changes: settings belong to the method that they were made for, and
    a model of one's own normalises for itself."""
    if name is None or name == entries.get("name"):
        return dict(entries)
    if section == "method":
        return {key: entries[key] for key in ("norm", "eps") if key in entries}
    if section == "model" and ":" in str(name):
        return {}
    return dict(entries)


@functools.cache
def _sections() -> dict[str, Any]:
    return {name: kind for name, kind in get_type_hints(Recipe).items() if name != "name"}


@functools.cache
def _keys() -> dict[str, dict[str, Any]]:
    """The keys of each section and their types."""
    return {name: get_type_hints(kind) for name, kind in _sections().items()}


def _section(kind: type[S], section: str, entries: Mapping[str, Any]) -> S:
    hints = _keys()[section]
    known = [key for key in hints if key != "settings"]
    values: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    entries = dict(sorted(entries.items(), key=lambda entry: entry[0] != "name"))
    own = methods.setting_types(str(entries.get("name", Method.name))) if kind is Method else {}
    for key, value in entries.items():
        if key in known:
            values[key] = convert(value, hints[key], f"{section}.{key}")
        elif key in own:
            settings[key] = convert(value, own[key], f"{section}.{key}")
        else:
            raise _unknown_key(section, key, [*known, *own])
    if kind is Method:
        values["settings"] = settings
    return kind(**values)


def _unknown_key(section: str, key: str, known: Sequence[str]) -> UsageError:
    """The error for a key that a section does not have; it may belong to another one, or look like one of its keys."""
    backwards = reversed(_keys().items())  # so that the first section with such a key counts
    homes = {name: f"{place}.{name}" for place, keys in backwards for name in keys}
    near = nearest(key, known)
    meant = (homes | _OTHER_NAMES).get(key) or (f"{section}.{near}" if near else None)
    hint = f"; did you mean '{meant}'?" if meant else "."
    return UsageError(f"unknown recipe key '{section}.{key}'{hint} Known in [{section}]: {', '.join(known)}.")


def _assign(document: dict[str, Any], key: str, value: Any) -> None:
    section, _, name = key.partition(".")
    if section not in _sections():
        raise unknown("section of a recipe", section, _sections())
    if name == "name":
        document[section] = _kept(section, document[section], value)
    document[section][name] = value
