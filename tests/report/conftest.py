"""Folders of runs that were never trained: a recipe, rows of metrics, and verdicts where they are wanted."""

import io
import json

import pytest
import torch
from rich.console import Console

from atas.evaluation import Evaluation
from atas.training import recipe


def make_rows(curve, collapsed_from=None):
    """One row an epoch from (clean, FGSM, PGD) accuracies."""
    rows = []
    for epoch, (clean, fgsm, pgd10) in enumerate(curve):
        collapsed = collapsed_from is not None and epoch >= collapsed_from
        row = {"epoch": epoch, "updates": 10 * (epoch + 1), "rate": 0.1, "loss": 1.0, "train_accuracy": 0.5}
        row |= {"clean": clean, "fgsm": fgsm, "pgd10": pgd10, "collapsed": collapsed}
        rows.append(row | {"seconds": 2.5 * (epoch + 1), "examples_per_second": 400.0})
    return rows


@pytest.fixture
def make_run(tmp_path):
    """Make a run's folder: `make_run("runs/first", "atas", right={"clean": 90, "fgsm": 50})`, of 100 examples."""

    def make(
        name, method="atas", curve=((0.5, 0.3, 0.2), (0.7, 0.45, 0.4)), collapsed_from=None, right=None, events=()
    ):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        settings = recipe.from_dict({"method": {"name": method, "eps": "8/255"}}, "toy")
        (folder / "recipe.toml").write_text(settings.to_toml())
        rows = [*make_rows(curve, collapsed_from), *events]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if right is not None:
            correct = {key: torch.arange(100) < count for key, count in right.items()}
            correct["worst"] = torch.stack(list(correct.values())).all(0)
            seconds = dict.fromkeys(correct, 1.0)
            Evaluation(settings.threat, correct, seconds, {}, {}, "weights", "data").save(folder / "evaluation.json")
        return folder

    return make


@pytest.fixture
def show():
    """A table as text, wide enough that no cell is broken."""

    def render(table):
        out = io.StringIO()
        Console(file=out, width=200).print(table)
        return out.getvalue()

    return render
