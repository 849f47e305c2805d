"""Find recipes by name or path, and read them.

A recipe may extend another with `extends = "name"` and hold only the keys that differ. The recipe that is saved with a
run is complete and without `extends`; running that file again gives the same run. Listing and finding recipes needs no
torch: the schema is imported when a recipe is loaded.
"""

from __future__ import annotations

import functools
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from atas._utils.documents import MalformedError, parse_toml, read_bytes
from atas._utils.formatting import shell_quote
from atas._utils.imports import is_code, is_timm
from atas.errors import UsageError, unknown

if TYPE_CHECKING:
    from atas.recipes.schema import Recipe


_OF_RUN = "recipe.toml"  # in the folder of a run
_DEFAULT_NAMES = {"optimizer": "sgd"}  # not written
_OF_ONE_OPTIMIZER = ("momentum", "nesterov", "betas", "eps")


class RecipeFile(NamedTuple):
    """The file of a recipe. `identity` differs between a packaged recipe and a file of the same name."""

    name: str
    identity: str
    content: bytes


def names() -> list[str]:
    """Return the names of the recipes that come with the package."""
    return list(_packaged())


def find(source: str | Path) -> RecipeFile:
    """Return the file of a recipe, by name or path.

    >>> find("digits-small-cnn-atas").content[:12]
    b'# atas train'
    """
    path = Path(source)
    if path.is_file():
        if path.suffix == ".npz":
            raise UsageError(f"{path} is data, not a recipe; to train on it: atas train --auto {shell_quote(path)}")
        try:
            return RecipeFile(path.stem, str(path.resolve()), read_bytes(path))
        except MalformedError as error:
            raise UsageError(f"{path} is not a recipe: {error}") from error
    if path.suffix == ".toml":
        raise UsageError(f"there is no recipe file {path}; `atas ls recipes` lists those that come with atas")
    name = str(source)
    if name not in names():
        if name and path.is_dir():
            raise UsageError(f"{path} is a folder, not a recipe; {_use_of_folder(path)}")
        known = sorted(names(), key=lambda recipe: not recipe.endswith("-atas"))  # the one to start with is named first
        raise unknown("recipe", name, known, see="`atas ls recipes` lists them")
    return RecipeFile(name, name, packaged_content(name))


def _use_of_folder(path: Path) -> str:
    """Return how to train with a folder that was passed as a recipe: that of a run, or one of images."""
    folder = shell_quote(path)
    if (path / _OF_RUN).is_file():
        return f"to continue its run: atas train --resume --out {folder}; its recipe is {path / _OF_RUN}"
    return f"to train on images in it: atas train --auto {folder}"


def packaged_content(name: str) -> bytes:
    """Return the content of a recipe that comes with the package."""
    return (resources.files("atas") / "recipes" / f"{name}.toml").read_bytes()


def load(source: str | Path | Recipe, *, trusted: bool = True) -> Recipe:
    """Load a recipe by name or path.

    `trusted` is false for a file that the user did not choose as a recipe: what it names as code is not imported.

    >>> load("cifar10-preact-resnet18-atas").method.name
    'atas'
    """
    from atas.recipes.schema import Recipe, from_dict

    if isinstance(source, Recipe):
        return source
    if not isinstance(source, str | Path):
        raise UsageError(f"a recipe is given by its name, its path or as a Recipe; got {type(source).__name__}")
    document, name = _read(source, ())
    return from_dict(document, name, trusted=trusted)


def _read(source: str | Path, seen: tuple[str, ...]) -> tuple[dict[str, Any], str]:
    name, identity, content = find(source)
    if identity in seen:
        circle = " -> ".join(Path(origin).stem for origin in (*seen, identity))
        raise UsageError(f"recipe '{name}' extends itself: {circle}")
    try:
        document = parse_toml(content)
    except MalformedError as error:
        raise UsageError(f"recipe {source} is not valid TOML: {error}") from error
    document.pop("expected", None)  # a result of this recipe, which others do not inherit
    if not document.keys() - {"name"}:
        raise UsageError(
            f'recipe {source} is empty; extend another one, such as extends = "cifar10-preact-resnet18-atas"'
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
            merged[section] = inherit(section, merged[section], entries.get("name")) | entries
        else:
            merged[section] = entries
    return merged, name


def inherit(section: str, entries: dict[str, Any], name: Any) -> dict[str, Any]:
    """Return the keys of a section that stay when its `name` changes: hyperparameters belong to their method, options
    and weights to their network, and momentum to SGD. A network of one's own, or of timm, has its own normalisation."""
    if name is None or name == entries.get("name", _DEFAULT_NAMES.get(section)):
        return dict(entries)
    if section == "method":
        return {key: entries[key] for key in ("norm", "eps") if key in entries}
    if section == "model":
        others = is_code(str(name)) or is_timm(str(name))
        return {} if others else {key: entries[key] for key in ("mean", "std") if key in entries}
    if section == "optimizer":
        return {key: value for key, value in entries.items() if key not in _OF_ONE_OPTIMIZER}
    return dict(entries)


@functools.cache
def _packaged() -> tuple[str, ...]:
    files = (resources.files("atas") / "recipes").iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))
