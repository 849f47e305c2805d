"""Results that were never trained for, and tiny trials that are."""

import io
import re
import shutil

import pytest
from rich.console import Console

from atas.evaluation import wilson
from atas.paper.measurements import default_measurements
from atas.sweeps import Plan, PlanProgress, Record, Store, Trial

TINY = {"training.epochs": 1, "training.batch_size": 512, "training.probe": 50, "engine.device": "cpu"}
DEVICE = {"device": "NVIDIA H200", "atas": "0.1.0", "commit": "0123abc", "torch": "2.9.0", "precision": "bf16"}


def make_record(trial, right, n=10_000, seconds=30.0, collapsed_in=None, weights="w", warnings=()):
    """The record of a trial with so many right examples by attack."""
    recipe = trial.resolved_recipe
    attacks = {
        name: {"accuracy": count / n, "interval": list(wilson(count, n)), "right": count, "seconds": 1.0}
        for name, count in right.items()
    }
    side = 32 + 2 * trial.padding
    about = {"attacks": list(right), "protocol": {"image_shape": [3, side, side]}, "environment": DEVICE}
    return Record(
        key=trial.key,
        row=trial.row,
        training_key=trial.training_key,
        seed=trial.seed,
        trial={"network": recipe.model.name, "method": recipe.method.name, "eps": "8/255"},
        settings=recipe.to_dict(),
        training={"seconds": seconds, "collapsed_in_epoch": collapsed_in, "environment": DEVICE},
        weights=weights,
        n=n,
        attacks=attacks,
        evaluations=[about | {"warnings": list(warnings)}],
    )


@pytest.fixture
def store(tmp_path):
    """An empty store."""
    return Store(tmp_path / "results")


@pytest.fixture
def fill(store):
    """Put made-up results into the store: `fill(trial, {"clean": 8122}, seconds=30)`."""

    def put(trial, right, **more):
        store.save(trial, make_record(trial, right, **more))

    return put


def tiny_trial(method="atas", values=None, **more):
    """Return a trial of one epoch of three steps on the digits."""
    options = {"attacks": ("fgsm",), "examples": 40, **more}
    return Trial(f"digits-small-cnn-{method}", {**TINY, **(values or {})}, **options)


@pytest.fixture
def tiny():
    """Make a trial of one epoch of three steps on the digits: `tiny("atta", seed=1)`."""
    return tiny_trial


def quiet_progress():
    """Return progress whose lines go to a string."""
    return PlanProgress(Console(file=io.StringIO(), width=200))


@pytest.fixture
def quiet():
    """Progress that is kept: `quiet.console.file.getvalue()`."""
    return quiet_progress()


@pytest.fixture(scope="session")
def finished_trials(tmp_path_factory):
    """A store with the finished trials `tiny()` and `tiny(seed=1)`; tests get copies of it."""
    folder = tmp_path_factory.mktemp("finished") / "results"
    assert Plan([tiny_trial(), tiny_trial(seed=1)], Store(folder), default_measurements).run(quiet_progress()) == []
    return folder


@pytest.fixture
def tiny_store(finished_trials, tmp_path):
    """A store with the finished trials `tiny()` and `tiny(seed=1)`."""
    return Store(shutil.copytree(finished_trials, tmp_path / "finished"))


@pytest.fixture
def trained():
    """List the seeds of the trainings in a store: `trained(store)`."""

    def seeds(store):
        folder = store.folder / "trainings"
        names = [path.name for path in folder.iterdir()] if folder.exists() else []
        return sorted(int(re.search(r"-seed(\d+)-", name)[1]) for name in names)

    return seeds
