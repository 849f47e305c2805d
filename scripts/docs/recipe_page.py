"""Generate the page of all recipe keys: types and defaults from the code, meanings from `keys.toml`.

The page is kept in the repository, and so are the names for shell completion in `src/atas/cli/completion.json`. Run
`python scripts/docs/recipe_page.py` to update both.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import tomllib
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

from atas import attacks, methods
from atas.evaluation import corruptions
from atas.recipes import Recipe
from atas.threat import EpsMultiple, format_pixels

_INTRODUCTION = """\
# Recipes

A recipe is a TOML file that describes a run completely. `atas ls recipes` lists the recipes of the package;
[your own](../own.md) extends one of them and states what differs:

```toml
extends = "cifar10-preact-resnet18-atas"   # or the path of a file

[method]
eps = "4/255"                              # numbers may be fractions

[training]
epochs = 15
```

<!-- shortened: --set training.epochs=1 -->
```sh
atas train digits-small-cnn-atas --set training.epochs=10 --set method.eps=0.2
```

Each key has a section below, so the search of the site finds it by its name, such as `schedule.peak`. The table at the
end lists the [settings of each method](#settings-of-the-methods).

`--set section.key=value` overrides a key on the command line, `values={"section.key": value}` in Python. An unknown key
is an error that names the nearest known one. The resolved recipe is saved with the run as `recipe.toml`, complete and
without `extends`: running that file again gives the same run. A recipe that extends another one and changes the method
keeps its norm and budget, but not the settings of the method; another network starts without the weights of the first.

Step sizes are numbers such as `0.1` and `"4/255"`, or follow `method.eps`: `"auto"`, and multiples such as `"2 eps"`.
The value `"none"` unsets a key. The path in `extends` is relative to the folder of the extending file; `data.root` and
a model's module are relative to the current folder.
"""


def page() -> str:
    """Return the whole page as Markdown: a heading for each key, so that search and links lead to it."""
    lines = [_INTRODUCTION]
    meanings = meanings_of_keys()
    for section, kind in sections().items():
        lines += [f"## [{section}]", "", _first_sentence(kind), ""]
        for key, hint, default in keys(kind):
            name = f"{section}.{key}"
            about = f"Type: {type_name(hint)}. Default: {default_name(name, default)}."
            lines += [f"### {name}", "", meanings[section][key], "", about, ""]
    return "\n".join([*lines, *_settings_of_methods(meanings["settings"])])


def _settings_of_methods(meanings: dict[str, Any]) -> list[str]:
    """Return the lines on the settings: which method has which, and a section for each key."""
    lines = ["## Settings of the methods", "", "Further keys of `[method]`; each method has its own.", ""]
    lines += ["| Method | Settings |", "|---|---|"]
    for name in methods.names():
        links = ", ".join(f"[`{key}`](#method{key})" for key in methods.settings(name))
        lines.append(f"| `{name}` | {links or 'none'} |")
    lines.append("")
    for key, meaning in meanings.items():
        lines += [f"### method.{key}", "", *_setting(key, meaning), ""]
    return lines


def _setting(key: str, meaning: str | dict[str, str]) -> list[str]:
    """Return the meaning of a setting, and a line for each group of methods with the same type and default."""
    groups: dict[str, list[str]] = {}
    for name in methods.names():
        if key in methods.settings(name):
            hint, default = methods.setting_types(name)[key], methods.settings(name)[key]
            about = f"Type: {type_name(hint)}. Default: {default_name(f'method.{key}', default)}."
            about = about if isinstance(meaning, str) else f"{meaning[name]} {about}"
            groups.setdefault(about, []).append(f"`{name}`")
    shared = [meaning, ""] if isinstance(meaning, str) else []
    if len(groups) == 1:
        return [*shared, *(f"{about} Methods: {', '.join(names)}." for about, names in groups.items())]
    return [*shared, *(f"- {', '.join(names)}: {about}" for about, names in groups.items())]


def _first_sentence(kind: type) -> str:
    return " ".join((inspect.getdoc(kind) or "").split()).partition(". ")[0].removesuffix(".") + "."


def meanings_of_keys() -> dict[str, dict[str, Any]]:
    """Read the sentences of `keys.toml`."""
    return tomllib.loads(Path(__file__).with_name("keys.toml").read_text(encoding="utf-8"))


def sections() -> dict[str, type]:
    """Return the sections of a recipe and their dataclasses."""
    return {name: kind for name, kind in get_type_hints(Recipe).items() if dataclasses.is_dataclass(kind)}


def keys(kind: type) -> list[tuple[str, Any, Any]]:
    """Return the keys of a section with type and default, without the settings of methods."""
    hints = get_type_hints(kind)
    return [
        (field.name, hints[field.name], field.default) for field in dataclasses.fields(kind) if field.name != "settings"
    ]


def type_name(hint: Any) -> str:
    """Name a type in the terms of TOML."""
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    names = [_one(option) for option in options if option is not type(None)]
    return " or ".join(dict.fromkeys(names))


def _one(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(f'`"{value}"`' for value in get_args(hint))
    if get_origin(hint) is tuple:
        inner = get_args(hint)
        kind = {float: "numbers", str: "texts"}.get(inner[0], "numbers or multiples of eps")
        return f"list of {kind}" if inner[-1] is Ellipsis else f"{len(inner)} {kind}"
    names = {str: "text", int: "whole number", float: "number", bool: "true or false", torch.dtype: "text"}
    return "multiple of eps" if hint is EpsMultiple else names[hint]


def default_name(key: str, default: Any) -> str:
    """Format a default as in a recipe file."""
    if default is None:
        return "not set"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, tuple):
        number = _share if key == "schedule.milestones" else "{:g}".format
        return "`[" + ", ".join(f'"{value}"' if isinstance(value, str) else number(value) for value in default) + "]`"
    if isinstance(default, float):
        return f'`"{format_pixels(default)}"`' if key == "method.eps" else f"`{default:g}`"
    return f'`"{default}"`' if isinstance(default, str) else f"`{default}`"


def _share(value: float) -> str:
    """Format milestones as thirtieths, the paper's epochs."""
    thirtieths = round(value * 30)
    return f'"{thirtieths}/30"' if re.fullmatch(r"\d+\.0*", f"{value * 30:.9f}") else f"{value:g}"


def completion_names() -> str:
    """Return the names for shell completion as JSON: keys of recipes, settings of methods, attacks and corruptions."""
    names = {
        "keys": {section: [key for key, *_ in keys(kind)] for section, kind in sections().items()},
        "settings": {name: list(methods.settings(name)) for name in methods.names() if methods.settings(name)},
        "attacks": [name for name in attacks.names() if "<" not in name],
        "corruptions": corruptions.names(),
    }
    return json.dumps(names, indent=1) + "\n"


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    (root / "docs" / "reference" / "recipes.md").write_text(page(), encoding="utf-8")
    (root / "src" / "atas" / "cli" / "completion.json").write_text(completion_names(), encoding="utf-8")
