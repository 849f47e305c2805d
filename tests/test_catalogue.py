"""Recipes and studies by the names of their files."""

import importlib
import pkgutil
from pathlib import Path

import pytest

from atas import recipes
from atas.errors import UsageError
from atas.paper import catalogue, studies
from atas.recipes import loading


def test_recipes_are_the_files():
    files = Path(recipes.__file__).parent.glob("*.toml")
    assert recipes.names() == loading.names() == sorted(path.stem for path in files)


def test_studies_are_the_modules_that_have_one():
    modules = (importlib.import_module(f"{studies.__name__}.{m.name}") for m in pkgutil.iter_modules(studies.__path__))
    known = sorted(module.STUDY.name for module in modules if hasattr(module, "STUDY"))
    assert studies.names() == catalogue.study_names() == known
    for name in known:
        assert studies.get(name).name == name


def test_a_file_goes_before_a_name(tmp_path, monkeypatch):
    """A file of one's own is read whatever it is called; its identity is where it is, not what it is called."""
    name = "digits-small-cnn-atas"
    (tmp_path / name).write_bytes(b"mine")
    packaged = loading.find(name)
    monkeypatch.chdir(tmp_path)
    mine = loading.find(name)
    assert (mine.name, mine.content) == (name, b"mine")
    assert mine.identity != packaged.identity
    assert loading.find(tmp_path / name) == mine


@pytest.mark.parametrize(
    ("find", "name", "part"),
    [
        (loading.find, "digits-small-cnn-attas", "unknown recipe 'digits-small-cnn-attas'; did you mean"),
        (loading.find, "none.toml", "there is no recipe file none.toml"),
        (loading.find, "__init__", "unknown recipe '__init__'"),
        (catalogue.study_module, "table-cifar", "unknown study 'table-cifar'; did you mean 'table-cifar10"),
        (catalogue.study_module, "table_cifar10", "unknown study 'table_cifar10'; did you mean 'table-cifar10"),
    ],
)
def test_a_wrong_name(find, name, part):
    with pytest.raises(UsageError, match=part):
        find(name)
