"""The studies, one a module: its name with dashes is the study's, and its `STUDY` is the study.

A new study is a new file here; nothing else needs to know of it.
"""

from __future__ import annotations

import importlib
import pkgutil

from atas.errors import unknown
from atas.reproduce.study import Study


def names() -> list[str]:
    """All studies by name."""
    return sorted(module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__) if module.name[0] != "_")


def get(name: str) -> Study:
    """The study of that name.

    >>> get("table-cifar10").name
    'table-cifar10'
    """
    if name not in names():
        raise unknown("study", name, names())
    study: Study = importlib.import_module(f"{__name__}.{name.replace('-', '_')}").STUDY
    return study
