"""The page on the architecture names what exists, and its table of packages has the layers of import-linter."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import tomllib
from pathlib import Path

import pytest

import atas
from atas.core import dispatch

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "atas"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
MODULES = {module.name for module in pkgutil.iter_modules(atas.__path__)}


def code_names(page: str) -> list[str]:
    """Return what stands in backticks, outside of blocks and without spaces."""
    text = re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL)
    return sorted(set(re.findall(r"`([^`\s]+)`", text)))


def is_path(name: str) -> bool:
    return name.endswith(("/", ".py"))


def is_file(name: str) -> bool:
    return is_path(name) or name.endswith((".json", ".jsonl", ".safetensors", ".toml", ".md"))


def is_object(name: str) -> bool:
    """Return whether a name begins with `atas` or with one of its packages."""
    first, _, rest = name.partition(".")
    ours = first in MODULES or (first == "atas" and bool(rest))
    return ours and not is_file(name) and re.fullmatch(r"\w+(\.\w+)*", name) is not None


def check_exists(name: str) -> None:
    """Raise if a dotted name is no module, class, function or method. The source decides if a module needs Triton."""
    found: object = atas
    path = "atas"
    parts = name.removeprefix("atas.").split(".")
    for number, part in enumerate(parts):
        path = f"{path}.{part}"
        if not hasattr(found, part):
            try:
                importlib.import_module(path)
            except ModuleNotFoundError as error:
                if error.name != "triton":
                    raise
                source = PACKAGE.joinpath(*parts[: number + 1]).with_suffix(".py")
                body = ast.parse(source.read_text(encoding="utf-8")).body
                for inner in parts[number + 1 :]:
                    (node,) = (node for node in body if getattr(node, "name", None) == inner)
                    body = getattr(node, "body", [])
                return
        found = getattr(found, part)


NAMES = code_names(PAGE)
PATHS = [name for name in NAMES if is_path(name)]
OBJECTS = [name for name in NAMES if is_object(name)]
DECORATORS = [name.removeprefix("@") for name in NAMES if name.startswith("@")]


@pytest.mark.parametrize("name", PATHS)
def test_a_path_exists(name):
    assert (PACKAGE / name).exists() or (ROOT / name).exists()


@pytest.mark.parametrize("name", OBJECTS)
def test_a_name_exists(name):
    check_exists(name)


@pytest.mark.parametrize("name", DECORATORS)
def test_a_decorator_is_part_of_dispatch(name):
    assert callable(getattr(dispatch, name))


def test_wrong_names_are_seen():
    assert len(PATHS) >= 9
    assert len(OBJECTS) >= 40
    for name in ("training.trainer.Trainer.learn", "training.nothing", "atas.nothing"):
        assert is_object(name)
        with pytest.raises((AttributeError, ImportError)):
            check_exists(name)


def test_a_training_step_is_told_in_nine_files():
    part = PAGE.partition("## One training step")[2].partition("\n## ")[0]
    assert len(set(re.findall(r"^\| `(\S+\.py)` \|", part, re.MULTILINE))) == 9


def test_the_table_has_all_packages_in_their_layers():
    """`core` stands for its modules in the layer above `threat`; `core.rng` and `core.dispatch` have their own."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = [re.split(r" [|:] ", layer) for layer in reversed(contract["contracts"][0]["layers"])]
    own = {"core.rng", "core.dispatch"}
    wanted = {
        name if name in own else name.partition(".")[0]: number
        for number, layer in enumerate(layers, start=1)
        for name in (module.removeprefix("atas.") for module in layer)
    }
    rows = re.findall(r"^\| (`.*?) \|.*\| (\d+) \|$", PAGE, re.MULTILINE)
    shown = {name.strip("`"): int(number) for names, number in rows for name in names.split(", ")}
    assert shown == wanted
    assert {name for name in shown if "." not in name} == MODULES - {"__main__"}


def test_the_contract_has_all_modules_of_core():
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    listed = re.findall(r"atas\.core\.(\w+)", " ".join(contract["contracts"][0]["layers"]))
    assert sorted(listed) == sorted(path.stem for path in (PACKAGE / "core").glob("[!_]*.py"))
