"""Folders of runs that were never trained: a recipe, rows of metrics, and verdicts where they are wanted; and one that
was, for a second or two."""

import io
import json
import shutil

import pytest
import torch
from helpers.run_files import metric_rows
from rich.console import Console

import atas
from atas import recipes, report
from atas.evaluation import Evaluation
from atas.report.run_view import RunView
from atas.training import TrainingProgress


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
        settings = recipes.from_dict({"method": {"name": method, "eps": "8/255"}}, "toy")
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
def add_result():
    """Add a result to a run's folder: `add_result(folder, "autoattack.json", n=50, clean=45, autoattack=3)`."""

    def add(folder, name, n, weights="weights", eps=8 / 255, warnings=(), **right):
        correct = {key: torch.arange(n) < count for key, count in right.items()}
        correct["worst"] = torch.stack(list(correct.values())).all(0)
        seconds = dict.fromkeys(correct, 1.0)
        result = Evaluation(atas.Linf(eps), correct, seconds, {}, {}, weights, "data", warnings=tuple(warnings))
        result.save(folder / name)

    return add


@pytest.fixture
def show():
    """A table as text, wide enough that no cell is broken."""

    def render(table):
        out = io.StringIO()
        Console(file=out, width=200).print(table)
        return out.getvalue()

    return render


ATTACKS = ("fgsm", "pgd10", "apgd-ce")


@pytest.fixture(scope="session")
def write_page():
    """Write the page of these runs."""

    def write(folders, path, **options):
        report.write_page(folders, path, **options)
        return path

    return write


@pytest.fixture(scope="session")
def healthy_page(tmp_path_factory, trained, write_page):
    """The page of the trained run."""
    return write_page([trained], tmp_path_factory.mktemp("page") / "healthy.html")


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The folder of a run on the digits, evaluated on 40 images; not to be changed."""
    folder = tmp_path_factory.mktemp("runs") / "healthy"
    values = {"training.epochs": 4, "method.eps": 0.1, "method.max_step": 0.2, "training.probe": 60}
    values |= {"engine.device": "cpu", "schedule.peak": 0.1}
    run = atas.train("digits-small-cnn-atas", out=folder, values=values, live=TrainingProgress(quiet=True))
    test = atas.data.load("digits").test.subset(slice(40))
    result = atas.evaluate(run.model, test, threat=run.recipe.threat, attacks=ATTACKS)
    result.save(folder / "evaluation.json")
    return folder


@pytest.fixture
def copy_of(tmp_path, trained):
    """The trained run in a folder of another name, to do things to; `without` names files to leave out."""

    def make(name="copy", without=()):
        folder = tmp_path / name
        shutil.copytree(trained, folder)
        for file in without:
            (folder / file).unlink()
        return folder

    return make


@pytest.fixture
def edit_evaluation():
    """Change fields of a run's saved evaluation."""

    def edit(folder, **values):
        file = folder / "evaluation.json"
        found = json.loads(file.read_text()) | values
        found.pop("checksum", None)  # as in files of earlier versions
        file.write_text(json.dumps(found))

    return edit


@pytest.fixture
def view_of():
    """A run as the sections see it."""

    def make(folder):
        (run,) = report.summarise([folder])
        return RunView(run, folder)

    return make


@pytest.fixture(scope="session")
def collapse():
    """Make a run's metrics those of one that collapsed in its third epoch."""

    def change(folder):
        rows = metric_rows(folder)
        for row in rows[2:]:
            row |= {"collapsed": True, "fgsm": 0.95, "pgd10": 0.01}
        rows.insert(3, {"event": "collapse", "epoch": 2, "pgd10": 0.01, "fgsm": 0.95})
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    return change
