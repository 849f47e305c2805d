"""Names for shell completion and for hints about wrong options, known without importing torch.

`completion.json` holds the keys of recipes and the names of attacks and corruptions. `python
scripts/docs/recipe_page.py` generates it from the schema and the registries.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from importlib import resources
from typing import Any

from atas.errors import nearest
from atas.paper import catalogue
from atas.recipes import loading

_OTHER_NAMES = {"lr": "schedule.peak", "learning_rate": "schedule.peak", "root": "data.root"}
_SIMILAR = 0.75


@functools.cache
def _known() -> dict[str, Any]:
    return dict(json.loads((resources.files("atas") / "cli" / "completion.json").read_text(encoding="utf-8")))


def attack_names() -> list[str]:
    """Return the names of the attacks."""
    return list(_known()["attacks"])


def recipe_keys() -> list[str]:
    """Return all keys of recipes, such as `training.epochs`; those of methods too."""
    keys = [f"{section}.{key}" for section, names in _known()["keys"].items() for key in names]
    settings = [f"method.{key}" for names in _known()["settings"].values() for key in names]
    return list(dict.fromkeys([*keys, *settings]))


def find_key(name: str, *, exact: bool = False) -> str | None:
    """Return the recipe key that was meant by a name without its section; unless `exact`, also by a similar name.

    >>> find_key("epochs"), find_key("lr"), find_key("batch-size"), find_key("epoch"), find_key("method")
    ('training.epochs', 'schedule.peak', 'training.batch_size', 'training.epochs', 'method.name')
    """
    name, sections = name.replace("-", "_"), _known()["keys"]
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name]
    if "name" in sections.get(name, ()):
        return f"{name}.name"
    keys = {key.partition(".")[2]: key for key in reversed(recipe_keys()) if not key.endswith(".name")}
    return keys.get(name) or (None if exact else keys.get(nearest(name, keys, _SIMILAR) or ""))


def hint_for_option(option: str, arguments: Iterable[str], similar: Iterable[str] = ()) -> str | None:
    """Return the assignment that replaces an unknown option, with the value that the arguments give it; None if no key
    is meant, or one of the `similar` options.

    >>> hint_for_option("--epochs", ["train", "x", "--epochs", "3"])
    '--set training.epochs=3'
    >>> hint_for_option("--epoch", ["train", "x", "--epoch=3"], ["--eps"]), hint_for_option("--see", [], ["--seed"])
    ('--set training.epochs=3', None)
    """
    name = option.lstrip("-").replace("-", "_")
    key = find_key(name)
    if key is None:
        return None
    options = [other.lstrip("-").replace("-", "_") for other in similar]
    if find_key(name, exact=True) is None and nearest(name, [*options, key.partition(".")[2]]) in options:
        return None
    words, value = list(arguments), "VALUE"
    for word, following in zip(words, [*words[1:], "-"], strict=True):
        if word.startswith(f"{option}="):
            value = word.partition("=")[2]
        elif word == option and not following.startswith("-"):
            value = following
    return f"--set {key}={value}"


def complete_recipes(incomplete: str) -> list[str]:
    """Complete names of recipes."""
    return _beginning_with(incomplete, loading.names())


def complete_studies(incomplete: str) -> list[str]:
    """Complete names of studies."""
    return _beginning_with(incomplete, catalogue.study_names())


def complete_attacks(incomplete: str) -> list[str]:
    """Complete the last of several names of attacks, separated by commas.

    >>> complete_attacks("pgd10,auto")
    ['pgd10,autoattack', 'pgd10,autoattack-rand']
    """
    return _last_of_several(incomplete, attack_names())


def complete_corruptions(incomplete: str) -> list[str]:
    """Complete the last of several names of corruptions, separated by commas; `all` stands alone.

    >>> complete_corruptions("a"), complete_corruptions("jpeg,s")
    (['all'], ['jpeg,shot-noise'])
    """
    return _last_of_several(incomplete, [*([] if "," in incomplete else ["all"]), *_known()["corruptions"]])


def complete_assignments(incomplete: str) -> list[str]:
    """Complete the key of `--set section.key=value`.

    >>> complete_assignments("training.ep")
    ['training.epochs=']
    """
    return _beginning_with(incomplete, [f"{key}=" for key in recipe_keys()])


def _last_of_several(incomplete: str, names: Iterable[str]) -> list[str]:
    given, comma, last = incomplete.rpartition(",")
    others = [name for name in names if name not in given.split(",")]
    return [f"{given}{comma}{name}" for name in _beginning_with(last, others)]


def _beginning_with(start: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(start)]
