"""Trials that are observed: what is seen goes into the record, is not seen twice, and leaves figures as they are."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from atas.errors import AtasError, DataError
from atas.paper import gradient_norms
from atas.paper.measurements import (
    Curves,
    Deciles,
    LossSurfaces,
    Norms,
    RobustLoss,
    StepGap,
    default_measurements,
    load_deciles,
)
from atas.paper.subsets import NormSubset
from atas.sweeps import Plan, Record, Store, Trial
from atas.training.metrics import read_metrics

RANKING = {"method.c": 1e9, "method.beta": 0.0, "method.max_step": 0.25}


@pytest.fixture
def ranks(tiny):
    """A trial that ranks the images."""
    return tiny("fgsm-rs-adaptive", RANKING, attacks=(), measurements=(Deciles(),))


def test_keys_are_those_that_records_were_written_with():
    """Whatever is added to trials, results that are known stay known."""
    trial = Trial("cifar10-preact-resnet18-atas")
    assert (trial.key, trial.training_key) == ("551447a0967c1552", "0b6e5470271550f9")
    assert replace(trial, measurements=(Curves(), Norms())).key == trial.key


@pytest.mark.slow
def test_every_training_is_watched_as_far_as_that_is_free(tiny, store, quiet):
    trials = [tiny("atas"), tiny("pgd")]
    Plan(trials, store, default_measurements).run(quiet)
    adaptive, plain = map(store.record, trials)
    assert set(adaptive.observed) == {"curves", "norms"}
    assert set(plain.observed) == {"curves"}
    (row,) = read_metrics(store.training_folder(trials[1]).metrics)
    assert plain.observed["curves"]["pgd10_loss"] == [row["pgd10_loss"]]
    assert plain.observed["curves"]["epoch"] == [1]
    assert plain.observed["curves"]["weights"] == plain.weights
    assert plain.observed["curves"]["environment"]["torch"] == torch.__version__
    assert adaptive.observed["norms"]["examples"] == 1297


@pytest.mark.slow
def test_known_measurements_are_not_repeated(tiny, tiny_store, quiet, trained):
    plan = Plan([tiny("atas", measurements=(Norms(), Curves()))], tiny_store, default_measurements)
    assert plan.remaining() == []
    plan = Plan([tiny("atas", measurements=(RobustLoss(30),))], tiny_store, default_measurements)
    assert len(plan.remaining()) == 1
    plan.run(quiet)
    assert trained(tiny_store) == [0, 1]  # the weights are there
    assert plan.remaining() == []
    assert tiny_store.record(tiny("atas")).observed["robust-loss"]["n"] == 30


@pytest.mark.slow
@pytest.mark.parametrize(("method", "values"), [("atas-plus", {}), ("atas", {"targets.share": 0.4})])
def test_a_training_with_remembered_predictions_is_measured(method, values, tiny, store, quiet):
    trial = tiny(method, values, measurements=(StepGap((0.1, 0.2), 30),))
    Plan([trial], store, default_measurements).run(quiet)
    assert trial.measurements[0].find(store.record(trial))["n"] == 30


@pytest.mark.slow
def test_other_settings_make_another_measurement(tiny, store, quiet):
    """In one plan and in a later one; neither takes the place of the other."""
    few, more, whole = (tiny("atas", measurements=(RobustLoss(images),)) for images in (30, 50, None))
    plan = Plan([few, whole], store, default_measurements)
    assert [len(trial.measurements) for trial in plan.trials] == [2]
    Plan([few], store, default_measurements).run(quiet)
    assert len(Plan([whole], store, default_measurements).remaining()) == 1
    for trial in (whole, more):
        Plan([trial], store, default_measurements).run(quiet)
    assert Plan([few, more, whole], store, default_measurements).remaining() == []
    record = store.record(few)
    assert record.observed["robust-loss"]["n"] == 30
    assert [trial.measurements[0].find(record)["n"] for trial in (few, more, whole)] == [30, 50, 1297]


@pytest.mark.parametrize(
    ("measurement", "entry", "fits"),
    [
        (RobustLoss(), {"n": 50_000}, True),
        (RobustLoss(300), {"n": 50_000}, False),
        (RobustLoss(300), {"n": 300}, True),
        (RobustLoss(), {"n": 300, "settings": {"images": 300}}, False),
        (StepGap((0.1, 0.2), 100), {"n": 100, "steps": [0.1, 0.2]}, True),
        (StepGap((0.1, 0.3), 100), {"n": 100, "steps": [0.1, 0.2]}, False),
        (Curves(), {}, True),
    ],
)
def test_entries_of_earlier_versions_do_not_state_their_settings(measurement, entry, fits, tiny, store, fill):
    trial = tiny()
    fill(trial, {"clean": 30}, n=40)
    record = store.record(trial).with_measurement(measurement.name, entry)
    assert (measurement.find(record) is not None) is fits


@pytest.mark.slow
def test_a_training_that_was_not_watched_is_done_again_and_its_figures_stay(tiny, store, quiet):
    trial = tiny("fgsm-rs-adaptive", RANKING)
    Plan([trial], store, default_measurements).run(quiet)
    place = store.training_folder(trial)
    for path in (place.path / "norms").iterdir():
        path.unlink()
    record = replace(store.record(trial), weights="of older software", observed={})
    store.save(trial, record)

    Plan([replace(trial, measurements=(Deciles(),))], store, default_measurements).run(quiet)
    after = store.record(trial)
    assert (after.attacks, after.weights) == (record.attacks, "of older software")
    assert len(after.observed["tenths"]["of_each"]) == 1297
    assert after.observed["tenths"]["weights"] != after.weights
    names = sorted(path.name for path in (store.folder / "trainings").iterdir())
    assert len(names) == 2
    assert any("-again-" in name for name in names)
    assert Plan([replace(trial, measurements=(Deciles(),))], store, default_measurements).remaining() == []


def test_observations_of_other_folders_count(tiny, tiny_store, tmp_path):
    second = Store(tmp_path / "second", [tiny_store.folder])
    assert Plan([tiny("atas", measurements=(Norms(),))], second, default_measurements).remaining() == []


@pytest.mark.slow
def test_a_record_of_an_earlier_version_is_read(tiny, store, quiet):
    Plan([tiny()], store, default_measurements).run(quiet)
    (path,) = (store.folder / "runs").glob("*.json")
    content = json.loads(path.read_text())
    del content["observed"]
    path.write_text(json.dumps(content))
    assert Record.load(path).observed == {}
    content["observed"] = {"norms": {}}
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="is damaged"):
        Record.load(path)


@pytest.mark.slow
def test_a_stop_during_an_observation_loses_that_one_alone(ranks, tiny, store, quiet, trained, monkeypatch):
    """Nothing is trained, evaluated or observed again but for what was under way."""
    stops = [KeyboardInterrupt]

    class StoppedOnce(LossSurfaces):
        def measure(self, training):
            if stops:
                raise stops.pop()
            return super().measure(training)

    trial = tiny("fgsm-rs", attacks=("fgsm",), measurements=(RobustLoss(20), StoppedOnce(ranks, images=5, points=2)))
    with pytest.raises(AtasError, match="the same command resumes it"):
        Plan([ranks, trial], store, default_measurements).run(quiet)
    before, evaluations = store.record(trial), sorted((store.folder / "evaluations").iterdir())
    assert set(before.observed) == {"curves", "robust-loss"}
    times = [path.stat().st_mtime_ns for path in evaluations]
    assert Plan([ranks, trial], store, default_measurements).run(quiet) == []
    after = store.record(trial)
    assert trained(store) == [0, 0]
    assert [path.stat().st_mtime_ns for path in evaluations] == times
    assert after.attacks == before.attacks
    assert after.observed["robust-loss"] == before.observed["robust-loss"]
    assert set(after.observed) == {*before.observed, "surfaces"}


@pytest.mark.slow
def test_records_alone_are_enough(ranks, tiny, store, quiet, trained, tmp_path):
    """Copied to another machine without weights, they count: for every study, and for trainings that rest on them."""
    surfaces = LossSurfaces(ranks, images=5, points=2)
    trials = [
        ranks,
        tiny("fgsm-rs", measurements=(surfaces, Curves())),
        tiny("atta", measurements=(StepGap((0.1,), 20), RobustLoss(20))),
        tiny("atas", measurements=(Norms(),)),
    ]
    assert Plan(trials, store, default_measurements).run(quiet) == []
    other = tmp_path / "other"
    shutil.copytree(store.folder / "runs", other / "runs")
    for elsewhere in (Store(other), Store(tmp_path / "third", [other])):
        assert Plan(trials, elsewhere, default_measurements).run(quiet) == []
        assert len(elsewhere.by_row()) == len(trials)
    part = tiny("fgsm-rs", attacks=(), subset=NormSubset(ranks, 1, 2))
    assert Plan([*trials, part], Store(other), default_measurements).run(quiet) == []
    assert [len(trained(one)) for one in (store, Store(other))] == [len(trials), 1]


@pytest.mark.slow
def test_weights_that_are_gone_are_made_again_only_for_what_needs_them(tiny, store, quiet, trained):
    """Then what the record knows of the first weights stays, or is measured anew, but is never lost."""
    trial = tiny("atas", attacks=("fgsm",), measurements=(RobustLoss(20),))
    Plan([trial], store, default_measurements).run(quiet)
    shutil.rmtree(store.folder / "trainings")
    first = replace(store.record(trial), weights="of another machine")
    store.save(trial, first)

    gap = replace(trial, measurements=(StepGap((0.1,), 20),))
    Plan([gap], store, default_measurements).run(quiet)
    record = store.record(trial)
    assert trained(store) == [0]
    assert (record.attacks, record.weights) == (first.attacks, first.weights)

    Plan([replace(trial, attacks=("pgd2",))], store, default_measurements).run(quiet)
    record = store.record(trial)
    assert trained(store) == [0]
    assert record.weights != first.weights
    assert set(record.attacks) == {"clean", "fgsm", "pgd2"}
    assert set(record.observed) == {"curves", "norms", "robust-loss", "step-gap"}


@pytest.mark.slow
def test_one_training_is_observed_before_it_is_evaluated_otherwise(tiny, store, quiet, trained):
    """Checkpoints are gone after the first of the trials that share a training."""
    plain, watched = tiny("atta", padding=2), tiny("atta", measurements=(StepGap((0.1,), 20),))
    between = tiny("fgsm-rs")
    plan = Plan([plain, between, watched], store, default_measurements)
    assert [trial.label for trial in plan.trials] == [watched.label, plain.label, between.label]
    assert plan.run(quiet) == []
    assert trained(store) == [0, 0]


@pytest.mark.slow
def test_a_training_is_done_as_often_as_it_takes(tiny, store, quiet):
    """The record of the second one, which left no checkpoint either, is lost."""
    trial = tiny("atta", attacks=(), measurements=(StepGap((0.1,), 20),))
    for _ in range(3):
        assert Plan([trial], store, default_measurements).run(quiet) == []
        store.save(trial, replace(store.record(trial), observed={}))
    assert len({path.name for path in (store.folder / "trainings").iterdir()}) == 3


# What is measured


@pytest.mark.slow
def test_tenths_are_of_the_norms_that_were_written(ranks, store, quiet):
    Plan([ranks], store, default_measurements).run(quiet)
    found = store.record(ranks).observed["tenths"]
    (norms,) = (store.training_folder(ranks).path / "norms").iterdir()
    expected = gradient_norms.deciles(load_file(norms)["gradient_norm"].double())
    assert torch.equal(load_deciles(ranks, store), expected)
    assert [sum(row) for row in found["class_shares"]] == pytest.approx([1.0] * 10)


@pytest.mark.slow
def test_a_part_is_trained_on_and_named(ranks, tiny, store, quiet):
    part = NormSubset(ranks, 9, 10)
    trial = tiny("fgsm-rs", attacks=(), subset=part)
    assert (
        trial.training_key
        != tiny("fgsm-rs").training_key
        != tiny("fgsm-rs", subset=NormSubset(ranks, 1, 2)).training_key
    )
    assert "D_9^10" in trial.label
    Plan([ranks, trial], store, default_measurements).run(quiet)
    rows = part.rows(store)
    (row,) = read_metrics(store.training_folder(trial).metrics)
    assert row["updates"] == 1  # all images take three
    assert torch.equal(rows, gradient_norms.decile_members(load_deciles(ranks, store), 9, 10))
    assert len(rows) == pytest.approx(1297 / 5, abs=2)
    assert store.record(trial).trial["part"] == [ranks.training_key, 9, 10]


@pytest.mark.slow
def test_a_part_without_its_ranking_fails_in_one_sentence(ranks, tiny, store, quiet):
    (failure,) = Plan([tiny("fgsm-rs", attacks=(), subset=NormSubset(ranks, 1, 2))], store, default_measurements).run(
        quiet
    )
    assert failure.sentence.startswith("the run that ranks the images is missing")


@pytest.mark.slow
def test_atta_steps_from_what_it_remembers(tiny, store, quiet):
    """With a step of nothing, the gap tells how much the remembered perturbations do."""
    sizes = (1e-9, 0.1)
    trials = [tiny(name, attacks=(), measurements=(StepGap(sizes, 100),)) for name in ("atta", "fgsm-rs")]
    assert Plan(trials, store, default_measurements).run(quiet) == []
    atta, noise = (store.record(trial).observed["step-gap"] for trial in trials)
    assert atta["steps"] == list(sizes)
    assert atta["n"] == 100
    assert set(noise["gap"]) == {"noise"}
    assert set(atta["gap"]) == {"noise", "memory"}
    assert noise["gap"]["noise"][0] > noise["gap"]["noise"][1]
    assert atta["gap"]["memory"][0] < atta["gap"]["noise"][0]
    assert not (store.training_folder(trials[0]).path / "checkpoints").exists()


@pytest.mark.slow
def test_surfaces_are_of_the_first_and_the_last_tenth(ranks, tiny, store, quiet):
    seen_of = LossSurfaces(ranks, images=20, points=3)
    trial = tiny("fgsm-rs", {"training.batch_size": 256}, attacks=(), measurements=(seen_of,))
    assert Plan([ranks, trial], store, default_measurements).run(quiet) == []
    seen = store.record(trial).observed["surfaces"]
    assert [moment["step"] for moment in seen["moments"]] == [2, 4, 6]
    assert seen["steps_an_epoch"] == 6
    for moment in seen["moments"]:
        assert len(moment["1"]) == len(moment["10"][0]) == 3
    assert not (store.training_folder(trial).path / "snapshots").exists()
