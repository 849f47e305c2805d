"""The studies, one a module: its name with dashes is the study's, and its `STUDY` is the study.

A new study is a new file here; nothing else needs to know of it.
"""

from __future__ import annotations

import importlib

from atas.paper import catalogue
from atas.paper.study import Study


def names() -> list[str]:
    """All studies by name."""
    return catalogue.study_names()


def get(name: str) -> Study:
    """The study of that name.

    >>> get("table-cifar10").name
    'table-cifar10'
    """
    study: Study = importlib.import_module(f"{__name__}.{catalogue.study_module(name)}").STUDY
    return study
