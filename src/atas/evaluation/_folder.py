"""The results that lie in a run's folder."""

from __future__ import annotations

from pathlib import Path

import torch

from atas._files import read_json
from atas.evaluation._result import Evaluation

_OWN = "evaluation"
_KEYS = {"format", "threat", "correct", "weights", "data"}


def results_in(folder: Path) -> list[Evaluation]:
    """The run's own first, then the others on its images, by name: those that were given one with `--out`, too."""
    paths = sorted(folder.glob("*.json"), key=lambda path: (path.stem != _OWN, path))
    found = [Evaluation.load(path) for path in paths if _is_result(path)]
    return [one for one in found if _same_images(found[0], one)]


def _is_result(path: Path) -> bool:
    """Also one that is damaged, where its name says so; but not one on other data, nor progress."""
    if path.name.startswith(".") or path.name.endswith((".progress.json", f"-{_OWN}.json")):
        return False
    return path.stem == _OWN or read_json(path).keys() >= _KEYS


def _same_images(one: Evaluation, other: Evaluation) -> bool:
    """Whether one may be of the first images of the other: a model that gives other answers is shown other images."""
    count = min(one.n, other.n)
    same = torch.equal(one.correct["clean"][:count], other.correct["clean"][:count])
    return same or one.weights != other.weights
