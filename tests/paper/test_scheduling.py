"""Processes that work in one folder: every run is done once, by whichever process is free."""

import io
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest
from rich.console import Console

from atas.errors import AtasError, UsageError
from atas.paper.measurements import Curves, Deciles, LossSurfaces, default_measurements
from atas.paper.subsets import NormSubset
from atas.sweeps import Plan, PlanProgress, Store
from atas.sweeps import locks as locks_module
from atas.sweeps.locks import Locks
from atas.sweeps.markdown import format_training_time, provenance
from atas.training import train
from atas.training.trainer import Interrupted

HOLD = """
import runpy, sys
from pathlib import Path

Locks = runpy.run_path(sys.argv[1])["Locks"]  # without the package, whose import is slow
with Locks(Path(sys.argv[2])) as locks, locks.try_lock(sys.argv[3]) as free, locks.device_in_use(sys.argv[4]):
    print(free, flush=True)
    sys.stdin.read()
"""

SHARE = """
import json, os, sys
import torch

torch.set_num_threads(1)
import torch.utils.tensorboard  # the import is slow; let it be done before the fork
from pathlib import Path
from rich.console import Console
from atas.paper.measurements import default_measurements
from atas.sweeps import Plan, PlanProgress, Store, Trial

folder = Path(json.loads(sys.argv[1])["shared"])
values = {"training.epochs": 1, "training.batch_size": 256, "training.probe": 50, "engine.device": "cpu"}
trials = [Trial("digits-small-cnn-atta", values, seed=seed, attacks=("fgsm",), examples=40) for seed in range(5)]


def work(name):
    folder.mkdir(exist_ok=True)
    plan = Plan(trials, Store(folder), default_measurements)
    failures = plan.run(PlanProgress(Console(file=(folder / name).open("w"), width=200)))
    return 1 if failures or plan.remaining() else 0


children = []
for name in ("one.txt", "two.txt"):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = work(name)
        finally:
            os._exit(status)
    children.append(child)
print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]))
"""


@contextmanager
def another_process(store, key, device="another"):
    """One that is at a training on a device, until it is told to end: `end()`."""
    command = [sys.executable, "-c", HOLD, locks_module.__file__, str(store.folder / ".claims"), key, device]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "True\n"

        def end():
            process.stdin.close()
            process.wait()

        yield end
        process.kill()
        process.wait()


@pytest.fixture
def waits(monkeypatch):
    """What is done instead of waiting: `waits.append(function)`, one for each time."""
    planned = []
    monkeypatch.setattr(time, "sleep", lambda _: planned.pop(0)())
    return planned


@pytest.fixture
def ranks(tiny):
    """A trial that ranks the images."""
    values = {"method.max_step": 0.2, "method.c": 1e9, "method.beta": 0.0}
    return tiny("fgsm-rs-adaptive", values, attacks=(), seed=7, measurements=(Deciles(),))


def test_a_claim_is_of_one_process_and_ends_with_it(store):
    store.folder.mkdir()
    with Locks(store.folder / ".claims") as locks:
        with another_process(store, "ff" * 8) as end:
            with locks.try_lock("ff" * 8) as free:
                assert not free
            with locks.try_lock("fe" * 8) as free:
                assert free
            end()
            with locks.try_lock("ff" * 8) as free:
                assert free
        with another_process(store, "fe" * 8):
            pass  # this one was given back here


def test_device_in_use_sees_other_processes(store):
    store.folder.mkdir()
    with Locks(store.folder / ".claims") as locks, locks.device_in_use("gpu 1") as others:
        assert not others()
        with another_process(store, "ff" * 8, "gpu 2"):
            assert not others()
        with another_process(store, "fe" * 8, "gpu 1") as end:
            assert others()
            assert others()  # to look changes nothing
            end()
            assert not others()


@pytest.mark.slow
def test_a_training_that_shared_its_device_is_not_timed(tiny, store, quiet):
    """With a process that was there at its beginning; the next one is timed again."""
    store.folder.mkdir()
    trials = [tiny(seed=0), tiny(seed=1)]
    with another_process(store, "ff" * 8, socket.gethostname()) as end:
        assert Plan(trials, store, default_measurements).run(quiet, lambda _: end()) == []
    shared, alone = (store.record(trial) for trial in trials)
    assert shared.seconds is None
    assert shared.training["seconds"] > 0
    assert alone.seconds > 0
    assert (format_training_time([]), format_training_time([shared])) == ("", "-")
    assert format_training_time([shared, alone]) == format_training_time([alone]) != "-"
    assert "- not timed: 1 of 2 trainings, which shared their device with others" in provenance([shared, alone])


@pytest.mark.slow
@pytest.mark.parametrize("when", ["only at first", "only between"])
def test_training_is_not_timed_if_another_process_used_the_device_for_a_while(tiny, store, quiet, when):
    """Also where the training is stopped meanwhile and goes on alone."""
    trial = tiny(values={"training.epochs": 3})
    store.folder.mkdir()

    def other():
        return another_process(store, "ff" * 8, socket.gethostname())

    with ExitStack() as others:

        class Stop(Curves):
            def callbacks(self, run_folder):
                return [self]

            def due(self, moment):
                return True

            def on_step_end(self, moment, engine):
                first = moment.batch == 1
                if when == "only between" and moment.epoch == 0 and first:
                    others.enter_context(other())
                if moment.epoch == (1 if when == "only between" else 0) and first:
                    others.close()
                if moment.epoch == 1 and moment.ends_epoch:
                    signal.raise_signal(signal.SIGINT)

        if when == "only at first":
            others.enter_context(other())
        with pytest.raises(AtasError, match="stopped in"):
            Plan([trial], store, lambda _: (Stop(),)).run(quiet)
    assert Plan([trial], store).run(quiet) == []
    assert store.record(trial).seconds is None


@pytest.mark.slow
def test_trial_of_another_process_is_deferred_and_taken_over_if_it_dies(tiny, store, quiet, waits):
    done = []
    store.folder.mkdir()
    trials = [tiny(seed=seed) for seed in range(3)]
    with another_process(store, trials[0].training_key) as killed:
        waits += [lambda: None, killed]
        assert Plan(trials, store, default_measurements).run(quiet, lambda trial: done.append(trial.seed)) == []
    assert done == [1, 2, 0]
    said = quiet.console.file.getvalue()
    assert said.count("waiting for 1 run of other processes") == 1


@pytest.mark.slow
def test_trial_that_another_process_finished_is_not_repeated(tiny, store, quiet, waits, fill):
    done = []
    store.folder.mkdir()
    trials = [tiny(seed=0), tiny(seed=1)]
    with another_process(store, trials[0].training_key) as end:
        waits += [lambda: (fill(trials[0], {"clean": 30, "fgsm": 20}, n=40), end())]
        assert Plan(trials, store, default_measurements).run(quiet, lambda trial: done.append(trial.seed)) == []
    assert done == [1]
    assert quiet.console.file.getvalue().endswith(f"1/2 {trials[0].label}: done by another process\n")


@pytest.mark.slow
def test_trial_that_failed_in_another_process_is_tried_here(tiny, store, quiet, waits):
    """Its machine may be the cause."""
    done = []
    store.folder.mkdir()
    trial = tiny()
    with another_process(store, trial.training_key) as end:
        waits += [lambda: (store.save_error(trial, "no electricity", ""), end())]
        assert Plan([trial], store, default_measurements).run(quiet, lambda trial: done.append(trial.seed)) == []
    assert done == [0]
    assert store.errors_by_row() == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["part", "observation"])
def test_trial_waits_for_the_run_of_another_process_that_it_depends_on(ranks, tiny, store, quiet, waits, kind):
    done = []
    store.folder.mkdir()
    if kind == "part":
        rests = tiny(seed=1, subset=NormSubset(ranks, 1, 3))
    else:
        rests = tiny(seed=1, measurements=(LossSurfaces(ranks, images=5, points=2),))
    with another_process(store, ranks.training_key) as killed:
        waits += [lambda: None, killed]
        assert (
            Plan([rests, tiny(seed=2), ranks], store, default_measurements).run(
                quiet, lambda trial: done.append(trial.seed)
            )
            == []
        )
    assert done == [2, 7, 1]


@pytest.mark.slow
def test_trial_waits_for_an_abandoned_run_that_it_depends_on(ranks, tiny, store, quiet):
    """The other process ends while this one is at something else: the run that was put off comes first."""
    done = []
    store.folder.mkdir()
    trials = [ranks, tiny(seed=2), tiny(seed=1, subset=NormSubset(ranks, 1, 3))]
    with another_process(store, ranks.training_key) as killed:
        assert (
            Plan(trials, store, default_measurements).run(
                quiet, lambda trial: (done.append(trial.seed), killed() if trial.seed == 2 else None)
            )
            == []
        )
    assert done == [2, 7, 1]


@pytest.mark.slow
def test_a_training_that_went_on_unobserved_is_done_once_more(ranks, tiny, store, quiet, trained):
    """A process that wants no surfaces is stopped on its way; one that does takes over, and has seen a part alone."""
    plain = tiny(seed=1, values={"training.epochs": 3})
    observed = replace(plain, measurements=(LossSurfaces(ranks, images=5, points=2),))
    place = store.training_folder(plain)

    class Stop:
        def due(self, moment):
            return moment.epoch == 1 and moment.ends_epoch

        def on_step_end(self, moment, engine):
            signal.raise_signal(signal.SIGINT)

    place.path.parent.mkdir(parents=True)
    with pytest.raises(Interrupted):
        train(plain.resolved_recipe, out=place.path, observers=[Stop()])
    assert Plan([ranks, observed], store, default_measurements).run(quiet) == []
    assert trained(store) == [1, 1, 7]
    moments = store.record(observed).observed["surfaces"]["moments"]
    assert [moment["step"] for moment in moments] == list(range(1, 10))


def test_records_of_another_folder_are_imported_unless_a_process_trains_them(tiny, store, quiet, tmp_path, fill):
    fill(tiny(), {"clean": 30, "fgsm": 20}, n=40)
    here = Store(tmp_path / "here", [store.folder])
    plan = Plan([tiny()], here, default_measurements)
    assert plan.remaining() == []
    assert not here.folder.exists()
    here.folder.mkdir()
    with another_process(here, tiny().training_key):
        plan.import_records()
        assert not here.by_row()
    plan.run(quiet)
    assert list(here.by_row()) == [tiny().row]


@pytest.mark.slow
def test_trials_that_others_finish_are_noticed_at_once(tiny, store, quiet, fill):
    """Not when its turn comes: the time left would be told too long until then."""
    done = []
    trials = [tiny(seed=seed) for seed in range(3)]
    figures = {"clean": 30, "fgsm": 20}
    assert (
        Plan(trials, store, default_measurements).run(
            quiet,
            lambda trial: (done.append(trial.seed), fill(trials[2], figures, n=40) if trial.seed == 0 else None),
        )
        == []
    )
    assert done == [0, 1]
    titles = [line for line in quiet.console.file.getvalue().splitlines() if line[0] != " "]
    assert titles == [
        f"1/3 {trials[0].label}",
        f"3/3 {trials[2].label}: done by another process",
        f"2/3 {trials[1].label}",
    ]


def test_the_pace_is_that_of_the_own_clock(tiny):
    now = [0.0]
    progress = PlanProgress(Console(file=io.StringIO()), clock=lambda: now[0])
    progress.expect(100)
    progress.done_by_other("one", 60)  # before there is a clock: it says nothing of the pace
    progress.start_trial("two", 10)
    progress.start_phase(10)
    now[0] += 8
    progress.reach(0.5)
    assert progress.seconds_left == pytest.approx(8 / 5 * 35)
    progress.end()
    progress.done_by_other("three", 15)  # meanwhile, so all go at the common pace
    assert progress.seconds_left == pytest.approx(8 / 20 * 15)


def test_a_stop_while_waiting(tiny, store, quiet, waits):
    def stop():
        raise KeyboardInterrupt

    store.folder.mkdir()
    with another_process(store, tiny().training_key):
        waits.append(stop)
        with pytest.raises(AtasError, match="stopped while waiting for runs of other processes"):
            Plan([tiny()], store, default_measurements).run(quiet)


@pytest.mark.slow
def test_two_processes_share_a_plan(tmp_path, run_script):
    """Neither does what the other one does, and both see all of it done in the end."""
    assert run_script(SHARE, shared=str(tmp_path / "shared")) == [0, 0]
    said = [(tmp_path / "shared" / name).read_text() for name in ("one.txt", "two.txt")]
    assert sum(text.count("(took ") for text in said) == 5
    assert all(text.count("(took ") >= 1 for text in said)
    assert not list((tmp_path / "shared" / "runs").glob("*.error.json"))


def test_torchrun_is_for_one_training(tiny, store, quiet, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="once for each GPU"):
        Plan([tiny()], store, default_measurements).run(quiet)
    assert not store.folder.exists()
