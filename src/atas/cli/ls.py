"""`atas ls`."""

from __future__ import annotations

import enum
import json
from typing import TYPE_CHECKING, Any

import typer

from atas._utils.console import import_torch, print_json, print_line, print_table

if TYPE_CHECKING:
    from atas.cli.listing import Row


class What(enum.StrEnum):
    """Things that can be listed."""

    METHODS = "methods"
    MODELS = "models"
    DATA = "data"
    ATTACKS = "attacks"
    RECIPES = "recipes"
    WEIGHTS = "weights"


# The columns of the tables; JSON has all values. The name of a recipe says the rest, which would make it too wide.
_SHOWN = {
    None: ("list", "count", "what", "examples"),
    What.METHODS: ("method", "what", "attack in", "settings"),
    What.MODELS: ("model", "parameters", "what"),
    What.DATA: ("data", "what", "shape", "classes", "train", "test", "where"),
    What.ATTACKS: ("attack", "norms", "max_queries", "what"),
    What.RECIPES: ("recipe", "threat", "epochs", "AutoAttack"),
    What.WEIGHTS: ("weights", "megabytes", "what"),
}
_HEADINGS = {"max_queries": "queries/image at most", "AutoAttack": "AutoAttack %"}


def ls(
    what: What | None = typer.Argument(None, help="What to list; without it, an overview."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
) -> None:
    """List methods, models, data, attacks, recipes or weights.

    Methods are listed with their settings and defaults, models with their parameters, attacks with their cost, recipes
    with their measured accuracy under AutoAttack; --json includes all expected results.

    \b
    Example: atas ls methods
             atas ls
    """
    import_torch()
    rows = _rows(what)
    if as_json:
        print_json(json.dumps(rows, indent=2, default=str))
        return
    from rich import box
    from rich.table import Table

    shown = _SHOWN[what]
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for key in shown:
        is_number = isinstance(rows[0][key], int | float)
        table.add_column(_HEADINGS.get(key, key), justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*(_cell(row[key]) for key in shown))
    print_table(table)
    if what is None:
        print_line("atas ls NAME lists them, such as: atas ls recipes")


def _rows(what: What | None) -> list[Row]:
    from atas.cli import listing

    return {
        None: listing.overview,
        What.METHODS: listing.method_rows,
        What.MODELS: listing.model_rows,
        What.DATA: listing.data_rows,
        What.ATTACKS: listing.attack_rows,
        What.RECIPES: listing.recipe_rows,
        What.WEIGHTS: listing.weights_rows,
    }[what]()


def _setting(value: Any) -> Any:
    """Return a default as a recipe writes it."""
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else value


def _cell(value: Any) -> str:
    """Return a value as text: numbers with thousands, lists and settings with commas."""
    if value is None or value == "":
        return "-"
    if isinstance(value, dict):
        return ", ".join(f"{key}={_setting(setting)}" for key, setting in value.items()) or "-"
    if isinstance(value, list):
        return ("x" if all(isinstance(item, int) for item in value) else ", ").join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else f"{value:.2f}" if isinstance(value, float) else str(value)
