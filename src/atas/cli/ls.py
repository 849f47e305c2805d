"""`atas ls`."""

from __future__ import annotations

import enum
import json
from typing import Any

import typer

from atas._utils.console import print_json, print_table


class What(enum.StrEnum):
    """Things that can be listed."""

    METHODS = "methods"
    MODELS = "models"
    DATA = "data"
    ATTACKS = "attacks"
    RECIPES = "recipes"


_MEASURED = "AutoAttack"
# The name of a recipe says the rest, which would make the table too wide; JSON has all columns.
_SHOWN = {What.RECIPES: ["recipe", "threat", "epochs", _MEASURED]}


def ls(
    what: What = typer.Argument(help="What to list."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
) -> None:
    """List methods, models, data sets, attacks or recipes.

    Methods are listed with their settings and defaults, recipes with their measured accuracy under AutoAttack;
    --json includes all expected results.

    \b
    Example: atas ls methods
    """
    from rich import box
    from rich.table import Table

    rows = _rows(what)
    if as_json:
        print_json(json.dumps(rows, indent=2))
        return
    shown = _SHOWN.get(what, list(rows[0]))
    table = Table(*shown, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(*(row[key] for key in shown))
    print_table(table)


def _rows(what: What) -> list[dict[str, Any]]:
    from atas import attacks, data, methods, models, recipes
    from atas.recipes.expected import find_expected

    if what is What.METHODS:
        built_in = {name: methods.get(name, trusted=False) for name in methods.names()}
        return [
            {
                "method": name,
                "attack in": f"{method.attack_mode} mode",
                "settings": ", ".join(f"{key}={value}" for key, value in methods.settings(name, trusted=False).items()),
                "what": (method.__doc__ or "").strip().splitlines()[0],
            }
            for name, method in built_in.items()
        ]
    if what is What.MODELS:
        return [{"model": name} for name in [*models.names(), "package.module:function"]]
    if what is What.DATA:
        return [{"data": name} for name in data.names()]
    if what is What.ATTACKS:
        return [{"attack": name} for name in attacks.names()]
    rows = []
    for name in recipes.names():
        loaded = recipes.load(name)
        expected = find_expected(loaded)
        figure = expected and expected.figure("autoattack")
        rows.append(
            {
                "recipe": name,
                "data": loaded.data.name,
                "model": loaded.model.name,
                "method": loaded.method.name,
                "threat": repr(loaded.threat),
                "epochs": str(loaded.training.epochs),
                _MEASURED: f"{figure.split()[0]}%" if figure else "-",
                "expect": expected.sentence if expected else None,
            }
        )
    return rows
