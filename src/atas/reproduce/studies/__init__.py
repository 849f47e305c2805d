"""The studies, one a module: its name with dashes is the study's, and its `STUDY` is the study.

A new study is a new file here; nothing else needs to know of it.
"""

from __future__ import annotations

import importlib

from atas import _catalogue
from atas.reproduce.study import Study


def names() -> list[str]:
    """All studies by name."""
    return _catalogue.studies()


def get(name: str) -> Study:
    """The study of that name.

    >>> get("table-cifar10").name
    'table-cifar10'
    """
    study: Study = importlib.import_module(f"{__name__}.{_catalogue.find_study(name)}").STUDY
    return study
