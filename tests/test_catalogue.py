"""Recipes and studies by the names of their files."""

import importlib
import pkgutil
from pathlib import Path

import pytest

from atas import _catalogue, recipes
from atas.errors import UsageError
from atas.reproduce import studies
from atas.training import recipe


def test_recipes_are_the_files():
    files = Path(recipes.__file__).parent.glob("*.toml")
    assert recipe.names() == _catalogue.recipes() == sorted(path.stem for path in files)


def test_studies_are_the_modules_that_have_one():
    modules = (importlib.import_module(f"{studies.__name__}.{m.name}") for m in pkgutil.iter_modules(studies.__path__))
    known = sorted(module.STUDY.name for module in modules if hasattr(module, "STUDY"))
    assert studies.names() == _catalogue.studies() == known
    for name in known:
        assert studies.get(name).name == name


def test_a_file_goes_before_a_name(tmp_path, monkeypatch):
    """A file of one's own is read whatever it is called; its identity is where it is, not what it is called."""
    name = "digits-small-cnn-atas"
    (tmp_path / name).write_bytes(b"mine")
    packaged = _catalogue.find_recipe(name)
    monkeypatch.chdir(tmp_path)
    mine = _catalogue.find_recipe(name)
    assert (mine.name, mine.content) == (name, b"mine")
    assert mine.identity != packaged.identity
    assert _catalogue.find_recipe(tmp_path / name) == mine


@pytest.mark.parametrize(
    ("find", "name", "part"),
    [
        (_catalogue.find_recipe, "digits-small-cnn-attas", "unknown recipe 'digits-small-cnn-attas'; did you mean"),
        (_catalogue.find_recipe, "none.toml", "there is no recipe file none.toml"),
        (_catalogue.find_recipe, "__init__", "unknown recipe '__init__'"),
        (_catalogue.find_study, "table-cifar", "unknown study 'table-cifar'; did you mean 'table-cifar10"),
        (_catalogue.find_study, "table_cifar10", "unknown study 'table_cifar10'; did you mean 'table-cifar10"),
    ],
)
def test_a_wrong_name(find, name, part):
    with pytest.raises(UsageError, match=part):
        find(name)
