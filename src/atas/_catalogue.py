"""Recipes and studies by name: files of the package, which can be listed and found without torch."""

from __future__ import annotations

import functools
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from atas.errors import UsageError, unknown


class RecipeFile(NamedTuple):
    """A recipe as it was found; the identity is the same only for the same file."""

    name: str
    identity: str
    content: bytes


def recipes() -> list[str]:
    """The recipes that come with the package."""
    return list(_stems("recipes", ".toml"))


def studies() -> list[str]:
    """The studies of `atas reproduce`: each is a module, and its name has dashes for underscores."""
    return [stem.replace("_", "-") for stem in _stems("reproduce/studies", ".py") if stem[0] != "_"]


def find_recipe(source: str | Path) -> RecipeFile:
    """The file of a recipe, by name or path.

    >>> find_recipe("digits-small-cnn-atas").content[:12]
    b'# atas train'
    """
    path = Path(source)
    if path.is_file():
        return RecipeFile(path.stem, str(path.resolve()), path.read_bytes())
    if path.suffix == ".toml":
        raise UsageError(f"there is no recipe file {path}; `atas ls recipes` shows those that come with atas")
    name = str(source)
    if name not in recipes():
        raise unknown("recipe", name, recipes(), see="`atas ls recipes` shows them")
    return RecipeFile(name, name, (resources.files("atas") / "recipes" / f"{name}.toml").read_bytes())


def find_study(name: str) -> str:
    """The name of a study's module.

    >>> find_study("table-cifar10")
    'table_cifar10'
    """
    if name not in studies():
        raise unknown("study", name, studies())
    return name.replace("-", "_")


@functools.cache
def _stems(folder: str, suffix: str) -> tuple[str, ...]:
    files = (resources.files("atas") / folder).iterdir()
    return tuple(sorted(file.name.removesuffix(suffix) for file in files if file.name.endswith(suffix)))
