"""The examples in docstrings say what the code does."""

import doctest
import importlib
import pkgutil

import pytest

import atas


def modules():
    """Every module of the library that can be imported here; `__main__` would run the command."""
    for info in pkgutil.walk_packages(atas.__path__, "atas."):
        if info.name.endswith(".__main__"):
            continue
        try:
            yield importlib.import_module(info.name)
        except ModuleNotFoundError as error:
            if error.name != "triton":  # which kernels need, and not every machine has
                raise


@pytest.mark.slow
def test_examples_in_docstrings_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = {module.__name__: doctest.testmod(module) for module in modules()}
    assert not [name for name, result in results.items() if result.failed], "see the output"
    assert sum(result.attempted for result in results.values()) > 100
