"""Plans: runs that are done once, survive a kill, and do not stop at a failure."""

import functools
import io
import json
import signal
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file

import atas
from atas.errors import AtasError, DataError, UsageError
from atas.evaluation import runner
from atas.paper.measurements import default_measurements
from atas.sweeps import Measurement, Plan, PlanProgress, Store, Trial, execute
from atas.training.trainer import Interrupted


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@dataclass(frozen=True)
class Failing(Measurement):
    """A measurement that cannot even begin."""

    error: BaseException
    name: ClassVar[str] = "failing"

    @property
    def settings(self):
        return {"error": repr(self.error)}

    def callbacks(self, run_folder):
        raise self.error

    def is_available(self, trial, run_folder):
        return True

    def measure(self, training):
        raise self.error


@pytest.mark.slow
def test_a_plan_writes_a_record_a_run(tiny, store, quiet):
    trials = [tiny(seed=0), tiny("atta", seed=3)]
    assert Plan(trials, store, default_measurements).run(quiet) == []
    for trial in trials:
        record = json.loads((store.folder / "runs" / f"{trial.slug}-{trial.key}.json").read_text())
        assert record["seed"] == trial.seed
        assert record["settings"]["training"] == json.loads(json.dumps(trial.resolved_recipe.to_dict()["training"]))
        assert record["trial"]["method"] == trial.resolved_recipe.method.name
        assert set(record["attacks"]) == {"clean", "fgsm"}
        low, high = record["attacks"]["fgsm"]["interval"]
        assert low <= record["attacks"]["fgsm"]["accuracy"] <= high
        assert record["n"] == 40
        assert record["training"]["seconds"] > 0
        environment = record["training"]["environment"]
        assert {"atas", "torch", "python", "device", "commit"} <= set(environment)
        assert record["evaluations"][0]["protocol"]["seed"] == 0
    said = quiet.console.file.getvalue()
    assert "1/2 digits, small-cnn, atas, 0.39" in said
    assert any(" left" in line for line in said.splitlines())
    assert "left" not in said.splitlines()[-1]
    assert not [name for name in files(store.folder) if "checkpoints" in name or "progress" in name]


@pytest.mark.slow
def test_finished_runs_are_not_run_again(tiny, tiny_store, quiet, trained):
    run = []  # seeds
    Plan([tiny(seed=0), tiny(seed=2)], tiny_store, default_measurements).run(
        quiet, lambda trial: run.append(trial.seed)
    )
    assert run == [2]
    assert trained(tiny_store) == [0, 1, 2]
    assert "1 of 2 runs are done already" in quiet.console.file.getvalue()


def test_the_same_run_twice_in_a_plan_is_one(tiny, store):
    plan = Plan(
        [tiny(attacks=("fgsm",)), tiny(attacks=("pgd2",)), tiny(values={"method.c": 2.0})], store, default_measurements
    )
    assert [trial.attacks for trial in plan.trials] == [("fgsm", "pgd2")]


@pytest.mark.slow
def test_one_training_serves_every_evaluation(tiny, tiny_store, quiet, trained):
    Plan([tiny(), tiny(padding=4), tiny(examples=20)], tiny_store, default_measurements).run(quiet)
    assert trained(tiny_store) == [0, 1]
    assert len(list((tiny_store.folder / "runs").iterdir())) == 4


@pytest.mark.slow
def test_a_later_attack_joins_those_that_are_known(tiny, tiny_store, quiet, trained):
    before = tiny_store.record(tiny())
    Plan([tiny(attacks=("fgsm", "pgd2"))], tiny_store, default_measurements).run(quiet)
    after = tiny_store.record(tiny())
    assert trained(tiny_store) == [0, 1]
    assert set(after.attacks) == {"clean", "fgsm", "pgd2"}
    assert after.attacks["fgsm"] == before.attacks["fgsm"]
    assert [about["attacks"] for about in after.evaluations] == [["clean", "fgsm"], ["clean", "pgd2"]]


@pytest.mark.slow
def test_runs_of_other_folders_are_used_and_written_down(tiny, tiny_store, tmp_path, quiet, trained):
    second = Store(tmp_path / "second", [tiny_store.folder])
    plan = Plan([tiny(seed=0), tiny(seed=1, padding=2)], second, default_measurements)
    assert [trial.padding for trial in plan.remaining()] == [2]  # the training is there, the evaluation is not
    assert plan.run(quiet) == []
    assert trained(tiny_store) == [0, 1]
    assert len(Store(tmp_path / "second").by_row()) == 2
    assert not (tmp_path / "second" / "trainings").exists()


def test_a_folder_without_results_cannot_be_reused(tmp_path):
    with pytest.raises(UsageError, match="holds no results to reuse"):
        Store(tmp_path / "out", [tmp_path])


@pytest.mark.slow
def test_figures_of_other_weights_are_not_mixed_in(tiny, tiny_store, quiet):
    """The training is gone, and another one came to other weights: then its figures replace the old ones."""
    trial = tiny(attacks=("fgsm",))
    tiny_store.save(trial, replace(tiny_store.record(trial), weights="of another training"))
    Plan([tiny(attacks=("fgsm", "pgd2"))], tiny_store, default_measurements).run(quiet)
    record = tiny_store.record(trial)
    assert record.weights != "of another training"
    assert [about["attacks"] for about in record.evaluations] == [["clean", "fgsm", "pgd2"]]


def test_joined_records_take_attacks_of_the_same_weights_alone(tiny, store, fill):
    trial, records = tiny(), []
    for attack, weights in (("fgsm", "w"), ("pgd10", "w"), ("pgd50", "v")):
        fill(trial, {"clean": 90, attack: 50}, n=100, weights=weights)
        records.append(store.record(trial))
    known, same, other = records
    assert list(known.merge(same).attacks) == ["clean", "fgsm", "pgd10"]
    assert len(known.merge(same).evaluations) == 2
    assert known.merge(other) == known


@pytest.mark.slow
def test_a_failure_is_written_down_and_the_rest_goes_on(tiny, store, quiet):
    bad = tiny(values={"schedule.peak": 1e30, "schedule.name": "piecewise"})
    good = tiny("atta")
    (failure,) = Plan([bad, good], store, default_measurements).run(quiet)
    assert failure.trial == bad
    assert "diverged" in failure.sentence
    assert store.record(bad) is None
    assert store.record(good) is not None
    assert store.errors_by_row()[bad.row] == [f"{bad.label}: {failure.sentence}"]
    assert "failed: the loss is" in quiet.console.file.getvalue()
    assert [trial.key for trial in Plan([bad, good], store, default_measurements).remaining()] == [bad.key]


@pytest.mark.slow
def test_a_failure_of_any_kind(tiny, tiny_store, quiet):
    trial = tiny(padding=1, measurements=(Failing(RuntimeError("out of\nmemory")),))
    (failure,) = Plan([trial], tiny_store, default_measurements).run(quiet)
    assert failure.sentence == "RuntimeError: out of memory"
    (path,) = (tiny_store.folder / "runs").glob("*.error.json")
    assert "Traceback" in json.loads(path.read_text())["trace"]


@pytest.mark.slow
def test_an_error_is_forgotten_when_the_run_succeeds(tiny, tiny_store, quiet):
    trial = tiny(padding=1)
    tiny_store.save_error(trial, "no electricity", "")
    Plan([trial], tiny_store, default_measurements).run(quiet)
    assert tiny_store.errors_by_row() == {}


def test_missing_data_ends_a_plan_before_it_begins(tiny, store, quiet, tmp_path):
    with pytest.raises(DataError):
        Plan([tiny(values={"data.name": "cifar10", "data.root": str(tmp_path)})], store, default_measurements).run(
            quiet
        )
    assert files(tmp_path) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Interrupted("stopped")])
def test_a_stop_is_no_failure(tiny, store, quiet, error):
    with pytest.raises(AtasError, match="the same command resumes it"):
        Plan([tiny()], store, lambda _: (Failing(error),)).run(quiet)
    assert files(store.folder) == [".claims"]


SCRIPT = """
import json, os, sys
import torch

torch.set_num_threads(1)
import torch.utils.tensorboard  # the import is slow; let it be done before the fork
from pathlib import Path
from rich.console import Console
from atas.paper.measurements import default_measurements
from atas.sweeps import Plan, PlanProgress, Store, Trial
from helpers.crash import attempt, die_in_write_when


values = {"training.epochs": 1, "training.batch_size": 64, "training.probe": 50, "engine.device": "cpu",
          "training.checkpoint_every": 0.0}
trials = [Trial(f"digits-small-cnn-{method}", values, attacks=("pgd5",), examples=60) for method in ("atas", "atta")]


def carry_out(folder, done=None):
    \"\"\"Run the plan, killed in the training after so many finished runs.\"\"\"

    def due():
        if done is None or len(list(folder.glob("runs/*.json"))) != done:
            return False
        return any(folder.glob("trainings/*/checkpoints/last.safetensors"))

    def work():
        die_in_write_when(due)
        Plan(trials, Store(folder), default_measurements).run(PlanProgress(Console(file=open(os.devnull, "w"))))

    return attempt(work)


order = json.loads(sys.argv[1])
killed, whole = (Path(order[name]) for name in ("killed", "whole"))
print(json.dumps([carry_out(killed, 0), carry_out(killed, 1), carry_out(killed), carry_out(whole)]))
"""


@pytest.mark.slow
def test_kill_and_go_on(tmp_path, run_script):
    """SIGKILL in the middle of the first and of the second training: the same weights and figures in the end."""
    assert run_script(SCRIPT) == [-signal.SIGKILL, -signal.SIGKILL, 0, 0]
    folder, whole = tmp_path / "killed", tmp_path / "whole"
    records = [sorted(place.glob("runs/*.json")) for place in (folder, whole)]
    assert [path.name for path in records[0]] == [path.name for path in records[1]]
    assert len(records[0]) == 2
    for one, other in zip(*records, strict=True):
        first, second = (json.loads(path.read_text()) for path in (one, other))
        assert first["weights"] == second["weights"]
        assert first["attacks"]["pgd5"]["right"] == second["attacks"]["pgd5"]["right"]
    for one in folder.glob("trainings/*/model.safetensors"):
        weights, expected = load_file(one), load_file(whole / one.relative_to(folder))
        assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())


@pytest.mark.slow
def test_evaluation_progress_is_kept_until_the_record_is_written(tiny, store, quiet, monkeypatch):
    monkeypatch.setattr(execute, "evaluate", functools.partial(execute.evaluate, progress_interval=0.0))
    trial = tiny()

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "save", killed)
        with pytest.raises(AtasError, match="the same command resumes it"):
            Plan([trial], store, default_measurements).run(quiet)
    progress = store.progress_file(trial)
    assert progress.exists()
    monkeypatch.setattr(runner.AttackRunner, "run_chunk", lambda *_: pytest.fail("evaluated again"))
    Plan([trial], store, default_measurements).run(quiet)
    assert not progress.exists()
    assert not store.record(trial).missing_attacks(trial.attacks)


def test_time_left_follows_the_work():
    now = [0.0]
    progress = PlanProgress(Console(file=io.StringIO()), clock=lambda: now[0])
    assert progress.seconds_left is None
    progress.expect(100)
    progress.start_trial("one", 40)
    progress.start_phase(40)
    now[0] += 8  # eight seconds ago
    progress.reach(0.5)
    assert progress.seconds_left == pytest.approx(8 / 20 * 80)
    progress.end()  # it failed half way: the rest of it will not be done
    assert progress.seconds_left == pytest.approx(8 / 20 * 60)


def test_compile_time_does_not_count_in_the_time_left():
    now = [0.0]
    progress = PlanProgress(Console(file=io.StringIO()), clock=lambda: now[0])
    progress.expect(100)
    progress.start_trial("one", 100)
    progress.start_phase(50)
    now[0] += 30  # compiling
    progress.live().start("training", 10, 0)
    now[0] += 8
    progress.reach(0.5)
    assert progress.seconds_left == pytest.approx(8 / 25 * 75)
    progress.start_phase(50)
    progress.live().start("another", 10, 0)
    assert progress.seconds_left == pytest.approx(8 / 25 * 50)


@pytest.mark.slow
def test_crops_of_larger_images_are_evaluated_at_the_centre(tmp_path, store, quiet):
    for half, label in (("train", "a"), ("train", "b"), ("test", "a"), ("test", "b")):
        (tmp_path / "photos" / half / label).mkdir(parents=True)
        for number in range(6):
            Image.new("RGB", (24, 20), (40 * number, 0, 0)).save(tmp_path / "photos" / half / label / f"{number}.png")
    atas.data.pack(tmp_path / "photos", tmp_path / "packed", size=20, fit="squash")
    values = {"data.root": str(tmp_path / "packed"), "data.size": 20, "data.view_size": 16, "method.grid": 4}
    values |= {"model.name": "small-cnn", "training.epochs": 1, "training.probe": 4, "engine.device": "cpu"}
    trials = [Trial("imagenet-resnet18-atas", values, attacks=("fgsm",), held_out=held) for held in (0, 3)]
    assert Plan(trials, store, default_measurements).run(quiet) == []
    for trial, count in zip(trials, (12, 3), strict=True):
        record = store.record(trial)
        assert record.evaluations[0]["protocol"]["image_shape"] == [3, 16, 16]
        assert record.n == count
