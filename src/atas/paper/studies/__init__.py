"""The studies, one per module.

The name of a study is that of its module, with dashes; the module defines `STUDY`. A new file adds a study.
"""

from __future__ import annotations

import importlib

from atas.paper import catalogue
from atas.paper.study import Study


def names() -> list[str]:
    """Return the names of all studies."""
    return catalogue.study_names()


def get(name: str) -> Study:
    """Return a study by name.

    >>> get("table-cifar10").name
    'table-cifar10'
    """
    study: Study = importlib.import_module(f"{__name__}.{catalogue.study_module(name)}").STUDY
    return study
