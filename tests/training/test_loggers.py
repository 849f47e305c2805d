"""Loggers: what they are told, that they cannot do harm, and that a resume tells nothing twice."""

import shutil
import sys
import threading
from types import SimpleNamespace

import pytest
from helpers.probes import scripted_probe

from atas.errors import UsageError
from atas.training import loggers
from atas.training.metrics import read_metrics
from atas.training.monitor import ProbeResult
from atas.training.trainer import Interrupted

OFF = {"training.loggers": ()}


class Recorder:
    """Remembers everything."""

    def __init__(self):
        self.started, self.rows, self.histograms, self.closed = [], [], [], 0

    def start(self, epoch):
        self.started.append(epoch)

    def log(self, epoch, scalars, histograms):
        self.rows.append({"epoch": epoch, **scalars})
        self.histograms.append({name: values.clone() for name, values in histograms.items()})

    def close(self):
        self.closed += 1


@pytest.fixture
def collapse_once():
    """A probe whose second result shows a collapse."""
    healthy = ProbeResult(clean=0.9, fgsm=0.6, pgd10=0.5, pgd10_loss=1.0)
    return scripted_probe(healthy, ProbeResult(clean=0.9, fgsm=0.95, pgd10=0.02, pgd10_loss=9.0), *[healthy] * 10)


def killed_after_the_last_row(folder, train_toy, observer, **options):
    """As if a run was killed when all its rows were logged, but the last checkpoint was of its sixth batch."""
    kept = folder.with_name("kept.safetensors")
    live = observer(
        on_batch=lambda seen: shutil.copy(folder / "checkpoints/last.safetensors", kept) if seen == 7 else 0
    )
    train_toy(folder, values={"training.checkpoint_every": 0.0, **options.pop("values", {})}, live=live, **options)
    kept.replace(folder / "checkpoints" / "last.safetensors")
    (folder / "model.safetensors").unlink()


def numbers_of(rows):
    """The numbers of rows of metrics; lists, such as quantiles, are for the report and not for loggers."""
    return [{key: value for key, value in row.items() if not isinstance(value, list)} for row in rows]


# The protocol


def test_a_logger_gets_the_numbers_of_every_row(tmp_path, train_toy):
    recorder = Recorder()
    run = train_toy(tmp_path / "run", values=OFF, loggers=[recorder])
    assert recorder.rows == numbers_of(run.metrics)
    assert (recorder.started, recorder.closed) == ([0], 1)


def test_histograms_are_of_every_example(tmp_path, train_toy, toy_data):
    recorder = Recorder()
    run = train_toy(tmp_path / "run", values=OFF, loggers=[recorder])
    for row, found in zip(run.metrics, recorder.histograms, strict=True):
        assert set(found) == {"step_sizes", "gradient_norms"}
        assert {len(values) for values in found.values()} == {len(toy_data.train)}
        assert float(found["gradient_norms"].mean()) == pytest.approx(row["gradient_norm"])
        assert float(found["step_sizes"].mean()) == pytest.approx(row["step_size"], rel=1e-5)


def test_a_method_without_adaptive_steps_has_no_histograms(tmp_path, train_toy):
    recorder = Recorder()
    train_toy(tmp_path / "run", "pgd", OFF | {"training.epochs": 1}, loggers=[recorder])
    assert recorder.histograms == [{}]


def test_a_rollback_starts_loggers_again_where_training_goes_on(tmp_path, train_toy, collapse_once):
    recorder = Recorder()
    values = OFF | {"training.on_collapse": "rollback"}
    run = train_toy(tmp_path / "run", values=values, loggers=[recorder], probe=collapse_once)
    assert recorder.started == [0, 1]
    assert [row["epoch"] for row in recorder.rows] == [0, 1, 1, 2]
    assert [recorder.rows[i] for i in (0, 2, 3)] == numbers_of(run.metrics)


def test_a_resume_starts_where_it_goes_on(tmp_path, train_toy, interrupt_after):
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "run", values=OFF, live=interrupt_after(6))
    recorder = Recorder()
    run = train_toy(tmp_path / "run", values=OFF, resume=True, loggers=[recorder])
    assert recorder.started == [1]
    assert recorder.rows == numbers_of(run.metrics)[1:]


# Loggers that fail


@pytest.mark.parametrize("where", ["start", "log", "close"])
@pytest.mark.slow
def test_a_failing_logger_is_said_once_and_changes_nothing(where, tmp_path, train_toy, observer, assert_same_run):
    class Failing(Recorder):
        def fail(self, *arguments):
            raise ConnectionError("no way\nout")

    setattr(Failing, where, Failing.fail)
    other, live = Recorder(), observer()
    run = train_toy(tmp_path / "run", values=OFF, live=live, loggers=[Failing(), other])
    said = [text for text in live.said if "Failing" in text]
    assert len(said) == 1
    assert "the logger Failing failed" in said[0]
    assert "(no way)" in said[0]
    assert "training continues" in said[0]
    assert other.rows == numbers_of(run.metrics)
    assert other.closed == 1
    train_toy(tmp_path / "without", values=OFF)
    assert_same_run(tmp_path / "run", tmp_path / "without")


def test_loggers_are_closed_when_a_run_is_stopped(tmp_path, train_toy, interrupt_after):
    recorder = Recorder()
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "run", values=OFF, live=interrupt_after(2), loggers=[recorder])
    assert recorder.closed == 1


def test_an_unknown_logger_is_refused(toy_recipe):
    with pytest.raises(UsageError, match=r"unknown value of training.loggers 'wandbb'; did you mean 'wandb'\?"):
        toy_recipe("atas", {"training.loggers": ["wandbb"]})


def test_one_logger_needs_no_brackets(toy_recipe):
    assert toy_recipe("atas", {"training.loggers": "wandb"}).training.loggers == ("wandb",)


# TensorBoard


def on_the_board(folder):
    """Steps and values of every scalar, and the steps of every histogram."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "histograms": 0})
    found.Reload()
    tags = found.Tags()
    scalars = {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in tags["scalars"]}
    return scalars, {tag: [event.step for event in found.Histograms(tag)] for tag in tags["histograms"]}


def assert_the_board_shows(run):
    scalars, histograms = on_the_board(run.folder)
    assert set(scalars) == set(numbers_of(run.metrics)[0]) - {"epoch"}
    for tag, events in scalars.items():
        assert [step for step, _ in events] == [row["epoch"] for row in run.metrics], tag
        assert [value for _, value in events] == pytest.approx([float(row[tag]) for row in run.metrics], rel=1e-5)
    epochs = [row["epoch"] for row in run.metrics]
    assert histograms == {"step_sizes": epochs, "gradient_norms": epochs}


def test_tensorboard_shows_what_the_metrics_say(tmp_path, train_toy):
    pytest.importorskip("tensorboard")
    assert_the_board_shows(train_toy(tmp_path / "run"))


def test_tensorboard_shows_nothing_twice_after_a_kill(tmp_path, train_toy, observer):
    pytest.importorskip("tensorboard")
    killed_after_the_last_row(tmp_path / "run", train_toy, observer)
    assert_the_board_shows(train_toy(tmp_path / "run", resume=True))


def test_tensorboard_takes_back_what_a_rollback_took_back(tmp_path, train_toy, collapse_once):
    pytest.importorskip("tensorboard")
    run = train_toy(tmp_path / "run", values={"training.on_collapse": "rollback"}, probe=collapse_once)
    assert [row.get("event") for row in read_metrics(run.folder / "metrics.jsonl")].count("rollback") == 1
    assert_the_board_shows(run)


def test_tensorboard_can_be_switched_off(tmp_path, train_toy):
    train_toy(tmp_path / "run", values=OFF)
    assert not (tmp_path / "run" / "tensorboard").exists()


# Weights & Biases


class FakeRun:
    """A run there: its history, by step, as the service keeps it."""

    def __init__(self):
        self.history, self.finished, self.defined = {}, 0, []

    @property
    def step(self):
        return max(self.history, default=-1) + 1

    def define_metric(self, name, step_metric):
        self.defined.append((name, step_metric))

    def log(self, row, step, commit):
        assert commit
        assert step == self.step, f"step {step} after {sorted(self.history)}"
        self.history[step] = row

    def finish(self):
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package; `runs` are those of the service, by id."""
    fake = SimpleNamespace(runs={}, inits=[], Histogram=lambda values: ("histogram", len(values)))

    def init(**options):
        fake.inits.append(options)
        return fake.runs.setdefault(options["id"], FakeRun())

    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return fake


WANDB = {"training.loggers": ("wandb",)}


def test_wandb_gets_every_row(tmp_path, train_toy, wandb, toy_data):
    run = train_toy(tmp_path / "run", values=WANDB)
    (there,) = wandb.runs.values()
    size = ("histogram", len(toy_data.train))
    assert list(there.history.values()) == [
        row | {"step_sizes": size, "gradient_norms": size} for row in numbers_of(run.metrics)
    ]
    assert there.finished == 1
    assert there.defined == [("*", "epoch")]
    (options,) = wandb.inits
    assert options["resume"] == "allow"
    assert options["name"] == "run"
    assert options["config"]["training"]["epochs"] == 3
    assert options["dir"] == str(tmp_path / "run")


def test_wandb_goes_on_with_the_same_run_and_says_nothing_twice(tmp_path, train_toy, observer, wandb):
    killed_after_the_last_row(tmp_path / "run", train_toy, observer, values=WANDB)
    assert len(next(iter(wandb.runs.values())).history) == 3
    run = train_toy(tmp_path / "run", values=WANDB | {"training.checkpoint_every": 0.0}, resume=True)
    (there,) = wandb.runs.values()
    assert [row["epoch"] for row in there.history.values()] == [0, 1, 2]
    assert len(wandb.inits) == 2
    assert len(run.metrics) == 3


def test_wandb_shows_an_epoch_that_is_trained_again_after_a_rollback(tmp_path, train_toy, wandb, collapse_once):
    train_toy(tmp_path / "run", values=WANDB | {"training.on_collapse": "rollback"}, probe=collapse_once)
    (there,) = wandb.runs.values()
    assert [row["epoch"] for row in there.history.values()] == [0, 1, 1, 2]


def test_a_run_begun_anew_is_a_new_one_there(tmp_path, train_toy, wandb):
    for _ in range(2):
        train_toy(tmp_path / "run", values=WANDB, overwrite=True)
    assert [len(there.history) for there in wandb.runs.values()] == [3, 3]


def test_wandb_that_cannot_be_reached_does_not_stop_a_run(tmp_path, train_toy, observer, wandb):
    def offline(**options):
        raise ConnectionError("api.wandb.ai cannot be reached")

    wandb.init, live = offline, observer()
    run = train_toy(tmp_path / "run", values=WANDB, live=live)
    assert len(run.metrics) == 3
    assert [text for text in live.said if "cannot be reached" in text] != []


def test_wandb_that_is_not_installed_is_refused_before_anything_is_lost(tmp_path, train_toy, monkeypatch):
    train_toy(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r"wandb, which is not installed .*pip install 'atas\[wandb\]'"):
        train_toy(tmp_path / "run", values=WANDB, overwrite=True)
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_loggers_may_change_on_a_resume(tmp_path, train_toy, interrupt_after, assert_same_run):
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "run", values=OFF, live=interrupt_after(6))
    train_toy(tmp_path / "run", resume=True)
    train_toy(tmp_path / "whole", values=OFF)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_full_disk_drops_tensorboard_with_a_sentence_and_no_traceback(tmp_path, train_toy, observer, monkeypatch):
    """Its own thread writes the file; what that thread raises is raised again where the training logs."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    write, written = RecordWriter.write, []

    def fill(self, data):
        written.append(data)
        if len(written) > 5:
            raise OSError(28, "No space left on device")
        write(self, data)

    printed = []
    monkeypatch.setattr(threading, "excepthook", printed.append)
    monkeypatch.setattr(RecordWriter, "write", fill)
    loggers._silence_writer_threads.cache_clear()
    live = observer()
    run = train_toy(tmp_path / "run", live=live)
    assert len(run.metrics) == 3
    (sentence,) = [said for said in live.said if "TensorBoard" in said]
    assert sentence.startswith("the logger TensorBoard failed and is dropped ([Errno 28] No space left on device)")
    assert not printed
    loggers._silence_writer_threads.cache_clear()


def test_a_wandb_that_cannot_be_imported_is_refused(tmp_path, train_toy, monkeypatch):
    """Whatever it raises: under torchrun the other processes wait for the first."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "wandb.py").write_text("raise AttributeError('no such descriptor')")
    monkeypatch.syspath_prepend(tmp_path / "broken")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UsageError, match=r"names wandb, which is not installed \(no such descriptor\); pip install"):
        train_toy(tmp_path / "run", values={"training.loggers": ["wandb"]})
    assert not (tmp_path / "run").exists()
