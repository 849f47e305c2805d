"""List the studies of `atas reproduce` by name, without importing torch.

Each study is a module in `atas/paper/studies`. Its name is the module's name with dashes for underscores.
"""

from __future__ import annotations

import functools
from importlib import resources

from atas.errors import unknown

_SUFFIX = ".py"


def study_names() -> list[str]:
    """Return the names of all studies, sorted."""
    return [stem.replace("_", "-") for stem in _module_names() if stem[0] != "_"]


def study_module(name: str) -> str:
    """Return the name of a study's module.

    >>> study_module("table-cifar10")
    'table_cifar10'
    """
    if name not in study_names():
        raise unknown("study", name, study_names())
    return name.replace("-", "_")


@functools.cache
def _module_names() -> tuple[str, ...]:
    files = (resources.files("atas") / "paper/studies").iterdir()
    return tuple(sorted(file.name.removesuffix(_SUFFIX) for file in files if file.name.endswith(_SUFFIX)))
