"""What the monitor may cost: how many images it probes and when, and what a run with unprobed epochs writes."""

import json

import pytest

import atas
from atas import recipes
from atas.errors import DataError
from atas.recipes import recipe_fingerprint
from atas.report.compare import plot_curves
from atas.report.summary import summarise
from atas.training.metrics import read_metrics
from atas.training.monitor import Monitor, ProbeResult
from atas.training.monitor_budget import resolve_probe
from atas.training.trainer import Interrupted

RECIPE = recipes.load("cifar10-preact-resnet18-atas")
PROBED = {"clean", "fgsm", "pgd10", "pgd10_loss", "probe_gradient_norms"}
SKIPS = {"training.probe_every": 2, "training.epochs": 5}


def passes_of_probe(training):
    """Forward passes for each epoch, where a backward pass to the inputs costs another one."""
    gradients, verdicts = 11, 3
    return training.probe * (2 * gradients + verdicts) / (training.probe_every or 1)


@pytest.mark.parametrize("examples", [1, 40, 64, 244, 500, 960, 1437, 5000, 20_000, 10**6])
@pytest.mark.parametrize(("method", "step"), [("atas", 5), ("standard", 3), ("pgd", 5)])
@pytest.mark.parametrize("on_collapse", ["warn", "rollback"])
def test_the_monitor_takes_at_most_a_quarter_of_the_steps(examples, method, step, on_collapse):
    recipe = RECIPE.with_values({"method.name": method, "training.on_collapse": on_collapse})
    training = resolve_probe(recipe, examples).training
    assert passes_of_probe(training) <= step * examples / 4
    assert 1 <= training.probe <= 1000
    assert on_collapse == "warn" or training.probe <= max(1, examples / 5)


@pytest.mark.parametrize(
    ("examples", "probe", "every"), [(50_000, 1000, None), (20_000, 1000, None), (1437, 71, None), (244, 64, 6)]
)
def test_small_sets_are_probed_with_fewer_images_and_then_more_rarely(examples, probe, every):
    resolved = resolve_probe(RECIPE, examples)
    assert (resolved.training.probe, resolved.training.probe_every) == (probe, every)
    assert resolve_probe(resolved, examples) == resolved


def test_numbers_of_the_recipe_stay():
    given = RECIPE.with_values({"training.probe": 1000})
    assert resolve_probe(given, 60) == given
    every = resolve_probe(RECIPE.with_values({"training.probe_every": 8}), 244).training
    assert (every.probe, every.probe_every) == (97, 8)


def test_smaller_training_images_leave_less_time():
    values = {"data.view": "crop", "data.view_size": 64, "method.grid": 32, "training.epochs": 4}
    ramp = {"data.view_start": 32, "data.view_ramp": 1.0}  # sides of 32, 32, 32 and 32: a quarter of the pixels
    whole, small = (resolve_probe(RECIPE.with_values(values | more), 8000).training.probe for more in ({}, ramp))
    assert small == pytest.approx(whole / 4, abs=1)


def test_the_fingerprint_is_that_of_earlier_versions():
    written = recipe_fingerprint(RECIPE.with_values({"training.probe": 1000}))
    assert recipe_fingerprint(RECIPE) == recipe_fingerprint(resolve_probe(RECIPE, 50_000)) == written
    assert recipe_fingerprint(RECIPE.with_values({"training.probe": 500})) != written


def test_the_run_keeps_the_numbers(tmp_path, train_toy):
    train_toy(tmp_path / "run", values={"training.probe": "auto", "training.epochs": 1})
    saved = recipes.load(tmp_path / "run" / "recipe.toml").training
    assert (saved.probe, saved.probe_every) == (60, 20)
    train_toy(tmp_path / "run", values={"training.probe": "auto", "training.epochs": 1}, resume=True)


def test_a_run_of_an_earlier_version_resumes_with_its_probe(tmp_path, train_toy, interrupt_after, rows_of):
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "run", live=interrupt_after(2))
    train_toy(tmp_path / "run", values={"training.probe": "auto"}, resume=True)
    assert recipes.load(tmp_path / "run" / "recipe.toml").training.probe == 20
    assert all(row.keys() >= PROBED for row in rows_of(tmp_path / "run"))


def test_a_probe_of_ones_own_is_called_after_every_epoch(tmp_path, train_toy, rows_of):
    probe = lambda model: ProbeResult(0.9, 0.6, 0.5)  # noqa: E731
    train_toy(tmp_path / "run", values={"training.probe": "auto"}, probe=probe)
    assert [row["pgd10"] for row in rows_of(tmp_path / "run")] == [0.5] * 3


# Epochs without a probe


def test_rows_of_unprobed_epochs_have_no_accuracies(tmp_path, train_toy, rows_of):
    train_toy(tmp_path / "run", values=SKIPS)
    train_toy(tmp_path / "every", values={"training.epochs": 5})
    rows, every = rows_of(tmp_path / "run"), rows_of(tmp_path / "every")
    assert [row.keys() >= PROBED for row in rows] == [False, True, False, True, True]
    for row, whole in zip(rows, every, strict=True):
        assert row == {key: value for key, value in whole.items() if key in row}
        assert whole.keys() - row.keys() in (set(), PROBED)


@pytest.mark.slow
def test_a_resume_gives_the_same_bits(tmp_path, train_toy, interrupt_after, assert_same_run):
    train_toy(tmp_path / "whole", values=SKIPS)
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "run", values=SKIPS, live=interrupt_after(10))
    train_toy(tmp_path / "run", values=SKIPS, resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_row_with_half_a_probe_is_damaged(tmp_path, train_toy):
    train_toy(tmp_path / "run", values={"training.epochs": 1})
    path = tmp_path / "run" / "metrics.jsonl"
    row = json.loads(path.read_text())
    row["pgd1O"] = row.pop("pgd10")
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match="pgd10"):
        read_metrics(path)


def scripted(*probes):
    """A probe with these results in turn; a missing one is an error."""
    left = iter([ProbeResult(*probe) for probe in probes])
    return lambda model: next(left)


GOOD, BAD, CHANCE = (0.9, 0.8, 0.7), (0.9, 0.95, 0.02), (0.1, 0.1, 0.1)


@pytest.mark.slow
def test_a_collapse_rolls_back_to_the_last_probed_epoch(tmp_path, train_toy, rows_of):
    values = SKIPS | {"training.on_collapse": "rollback", "training.epochs": 6}
    train_toy(tmp_path / "run", values=values, probe=scripted(GOOD, BAD, GOOD, GOOD))
    events = [row for row in rows_of(tmp_path / "run") if "event" in row]
    assert [(row["event"], row["epoch"]) for row in events] == [("collapse", 3), ("rollback", 3)]
    assert events[1]["to_epoch"] == 2


def test_a_collapse_is_reported_once_and_stays_in_the_rows(tmp_path, train_toy, rows_of):
    train_toy(tmp_path / "run", values=SKIPS, probe=scripted(GOOD, BAD, BAD))
    rows = rows_of(tmp_path / "run")
    assert [row["collapsed"] for row in rows if "event" not in row] == [False, False, False, True, True]
    assert [row["event"] for row in rows if "event" in row] == ["collapse"]


@pytest.mark.parametrize(("every", "epochs", "first"), [(1, 5, 3), (2, 5, 3), (2, 6, 3), (3, 8, 5)])
def test_a_breakdown_is_dated_to_the_first_bad_probe(every, epochs, first, tmp_path, train_toy, rows_of):
    values = {"training.probe_every": every, "training.epochs": epochs}
    probed = sum((epoch + 1) % every == 0 or epoch + 1 == epochs for epoch in range(epochs))
    good = (first + 1) // every - 1
    train_toy(tmp_path / "run", values=values, probe=scripted(*[GOOD] * good, *[CHANCE] * (probed - good)))
    (event,) = (row for row in rows_of(tmp_path / "run") if "event" in row)
    assert (event["event"], event["epoch"]) == ("breakdown", first)


@pytest.mark.slow
def test_runs_with_unprobed_epochs_are_shown(tmp_path, train_toy, rows_of):
    train_toy(tmp_path / "run", values=SKIPS | {"training.epochs": 3})
    plot_curves(summarise([tmp_path / "run"]), tmp_path / "curves.svg")
    assert (tmp_path / "curves.svg").stat().st_size


def test_the_probe_is_due_after_every_few_epochs_and_the_last(toy_data):
    monitor = Monitor(toy_data.train.images, toy_data.train.labels, atas.Linf(0.1), every=3)
    assert [epoch for epoch in range(8) if monitor.due(epoch, 8)] == [2, 5, 7]
