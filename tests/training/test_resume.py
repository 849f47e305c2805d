"""A run that was stopped, however, goes on and ends with the same bits as one that never was."""

import json
import os
import signal

import pytest
import torch

import atas
from atas.errors import DataError, UsageError
from atas.training import checkpoint
from atas.training.trainer import Interrupted


@pytest.mark.parametrize("method", atas.methods.names())
@pytest.mark.slow
def test_interrupted_in_the_middle_of_an_epoch(method, tmp_path, train_toy, interrupt_after, assert_same_run):
    values = {"training.ema": 0.9, "training.epochs": 2}
    train_toy(tmp_path / "whole", method, values)
    with pytest.raises(Interrupted, match=r"after batch 2 of epoch 2; the run is saved, continue with: atas train"):
        train_toy(tmp_path / "parts", method, values, live=interrupt_after(6))
    train_toy(tmp_path / "parts", method, values, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("form", ["ascent", "attack", "momentum"])
@pytest.mark.slow
def test_interrupted_with_perturbed_weights(form, tmp_path, train_toy, interrupt_after, assert_same_run):
    values = {"training.ema": 0.9, "training.epochs": 2, "optimizer.perturb": form, "optimizer.perturb_gamma": 0.05}
    train_toy(tmp_path / "whole", "atas", values)
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "parts", "atas", values, live=interrupt_after(6))
    train_toy(tmp_path / "parts", "atas", values, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("form", ["ascent", "attack"])
@pytest.mark.slow
def test_interrupted_with_everything_that_a_loss_can_have(form, tmp_path, train_toy, interrupt_after, assert_same_run):
    values = {
        "training.ema": (0.9, 0.5),
        "training.ema_batchnorm": "re-estimate",
        "training.epochs": 3,
        "schedule.name": "cyclic",
        "schedule.final": 0.1,
        "consistency.weight": 1.0,
        "consistency.ramp": 0.8,
        "consistency.through": "both",
        "optimizer.perturb": form,
        "optimizer.perturb_from": 1,
        "data.view": "cropshift",
        "data.shift": 2,
        "data.erase": 0.5,
        "data.view_until": 0.5,
        "method.from_epoch": 1,
    }
    train_toy(tmp_path / "whole", "atas-plus", values)
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "parts", "atas-plus", values, live=interrupt_after(6))
    train_toy(tmp_path / "parts", "atas-plus", values, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_interrupted_with_a_teacher(tmp_path, train_toy, interrupt_after, assert_same_run):
    values = {"training.ema": 0.9, "training.epochs": 3, "targets.teacher_share": (0.7, 0.95)}
    run = train_toy(tmp_path / "whole", "atas", values)
    assert run.metrics != train_toy(tmp_path / "labels", "atas", {"training.ema": 0.9, "training.epochs": 3}).metrics
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "parts", "atas", values, live=interrupt_after(6))
    train_toy(tmp_path / "parts", "atas", values, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
def test_interrupted_after_every_single_batch(tmp_path, train_toy, interrupt_after, assert_same_run):
    """The last batch of an epoch too, where the epoch's end is still to come; memory is reset in epoch 2."""
    train_toy(tmp_path / "whole")
    stops = 0
    while True:
        try:
            train_toy(tmp_path / "parts", resume=True, live=interrupt_after(1))
            break
        except Interrupted:
            stops += 1
    assert stops == 3 * 4
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_seconds_count_what_was_spent_before_the_stop(tmp_path, train_toy, interrupt_after):
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "run", live=interrupt_after(6))
    path = tmp_path / "run" / "checkpoints" / "last.safetensors"
    tensors, state = checkpoint.load(path)
    checkpoint.save(path, tensors, state | {"seconds": 1000.0})
    run = train_toy(tmp_path / "run", resume=True)
    before, *after = (row["seconds"] for row in run.metrics)
    assert before < 1000 < after[0] < after[1] < 1100


@pytest.fixture
def hangup():
    """Say how a lost terminal is answered; tests may run under nohup."""
    before = signal.getsignal(signal.SIGHUP)
    yield lambda handler: signal.signal(signal.SIGHUP, handler)
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("numbers", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGHUP, signal.SIGHUP]])
def test_a_signal_ends_the_run_after_the_step_and_handlers_are_put_back(numbers, tmp_path, train_toy, observer, hangup):
    """A lost terminal may send its own twice, from the kernel and from the shell."""
    hangup(signal.SIG_DFL)
    found = {other: signal.getsignal(other) for other in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def stop(seen):
        if seen == 3:
            for number in numbers:
                os.kill(os.getpid(), number)

    with pytest.raises(Interrupted, match="batch 3 of epoch 1"):
        train_toy(tmp_path / "run", live=observer(on_batch=stop))
    assert {other: signal.getsignal(other) for other in found} == found
    _, state = checkpoint.load(tmp_path / "run" / "checkpoints" / "last.safetensors")
    assert (state["epoch"], state["batch"], state["updates"]) == (0, 3, 3)


def test_under_nohup_a_lost_terminal_ends_nothing(tmp_path, train_toy, observer, hangup):
    hangup(signal.SIG_IGN)
    live = observer(on_batch=lambda seen: os.kill(os.getpid(), signal.SIGHUP))
    run = train_toy(tmp_path / "run", live=live)
    assert live.batches == 12
    assert [row["epoch"] for row in run.metrics] == [0, 1, 2]


@pytest.fixture
def interruptible():
    """As in a terminal: a process that was started in the background may ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_second_signal_ends_at_once(tmp_path, train_toy, observer, interruptible):
    def stop(seen):
        if seen == 2:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train_toy(tmp_path / "run", live=observer(on_batch=stop))


def test_the_checkpoint_holds_all_that_the_next_step_depends_on(tmp_path, train_toy, interrupt_after):
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "run", values={"training.ema": 0.9}, live=interrupt_after(6))
    tensors, state = checkpoint.load(tmp_path / "run" / "checkpoints" / "last.safetensors")
    parts = {name.split(".")[0] for name in tensors}
    assert parts == {"model", "momentum", "method", "ema", "totals"}
    assert (state["epoch"], state["batch"], state["updates"]) == (1, 2, 6)
    assert tensors["ema.updates"] == 6
    assert tensors["method.epoch"] == 1
    assert tensors["totals.sums"][3] == 32  # examples of the epoch so far
    assert any("memory" in name for name in tensors)
    assert any("norms" in name for name in tensors)
    assert set(state["monitor"]) == {"best", "collapsed", "gone", "lost", "said", "said_broken_down"}
    assert state["metrics_bytes"] == (tmp_path / "run" / "metrics.jsonl").stat().st_size


def test_metrics_written_after_the_checkpoint_are_cut_back(tmp_path, train_toy, interrupt_after, assert_same_run):
    train_toy(tmp_path / "whole")
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "parts", live=interrupt_after(6))
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 1, "loss": 0.5, "clean": 0.')  # a crash in the middle of a line
    train_toy(tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_run_that_an_earlier_version_began(tmp_path, train_toy, interrupt_after, assert_same_run):
    """Its rows have no checksum; those that are added have one."""
    train_toy(tmp_path / "whole")
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "parts", live=interrupt_after(6))
    metrics, last = tmp_path / "parts" / "metrics.jsonl", tmp_path / "parts" / "checkpoints" / "last.safetensors"
    row = json.loads(metrics.read_text())
    assert row.pop("checksum")
    metrics.write_text(json.dumps(row) + "\n")
    tensors, state = checkpoint.load(last)
    checkpoint.save(last, tensors, state | {"metrics_bytes": metrics.stat().st_size})
    run = train_toy(tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    assert ["checksum" in json.loads(line) for line in metrics.read_text().splitlines()] == [False, True, True]
    assert run.metrics[0] == row
    assert not any("checksum" in row for row in run.metrics)


def test_a_changed_row_of_a_stopped_run_is_said(tmp_path, train_toy, interrupt_after):
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "run", live=interrupt_after(6))
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_text(path.read_text().replace('"updates": 4', '"updates": 5'))
    with pytest.raises(DataError, match=r"metrics\.jsonl are damaged \(line 1: its checksum is wrong\)"):
        train_toy(tmp_path / "run", resume=True)


def test_metrics_that_were_lost_do_not_spoil_those_to_come(tmp_path, train_toy, interrupt_after):
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "run", live=interrupt_after(6))
    (tmp_path / "run" / "metrics.jsonl").unlink()
    run = train_toy(tmp_path / "run", resume=True)
    assert [row["epoch"] for row in run.metrics] == [1, 2]


def test_resume_says_where_it_goes_on(tmp_path, train_toy, interrupt_after, observer):
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "run", live=interrupt_after(6))
    live = observer()
    train_toy(tmp_path / "run", resume=True, live=live)
    assert live.said[1].startswith("resuming ")
    assert live.said[1].endswith("at epoch 2, batch 3")
    assert live.batches == 2 + 4


def test_the_recipe_may_be_left_out(tmp_path, train_toy, interrupt_after, assert_same_run, toy_data, tiny_net):
    import atas

    train_toy(tmp_path / "whole")
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "parts", live=interrupt_after(5))
    atas.train(out=tmp_path / "parts", resume=True, data=toy_data, model=tiny_net(seed=9))
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    with pytest.raises(UsageError, match="pass a recipe"):
        atas.train(out=tmp_path / "parts")


def test_stopped_before_the_first_checkpoint_the_run_begins_anew(tmp_path, train_toy, observer, assert_same_run):
    class PowerCutError(BaseException):
        pass

    def cut(seen):
        if seen == 6:
            raise PowerCutError

    train_toy(tmp_path / "whole")
    with pytest.raises(PowerCutError):
        train_toy(tmp_path / "parts", live=observer(on_batch=cut))
    assert not (tmp_path / "parts" / "checkpoints").exists()
    assert (tmp_path / "parts" / "metrics.jsonl").stat().st_size
    train_toy(tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("torch_version", [torch.__version__, "0.1"])
def test_resuming_a_finished_run_changes_nothing(torch_version, tmp_path, train_toy, observer):
    run = train_toy(tmp_path / "run")
    environment = tmp_path / "run" / "environment.json"
    environment.write_text(environment.read_text().replace(torch.__version__, torch_version))
    kept = ("recipe.toml", "environment.json", "metrics.jsonl", "model.safetensors", "checkpoints/last.safetensors")
    before = {name: (tmp_path / "run" / name).read_bytes() for name in kept}
    live = observer()
    again = train_toy(tmp_path / "run", resume=True, live=live)
    assert live.batches == 0
    assert {name: (tmp_path / "run" / name).read_bytes() for name in kept} == before
    assert again.metrics == run.metrics
    for name, tensor in again.model.state_dict().items():
        assert torch.equal(tensor, run.model.state_dict()[name])


def test_a_finished_run_is_not_said_to_go_on(tmp_path, train_toy, observer):
    train_toy(tmp_path / "run")
    live = observer()
    train_toy(tmp_path / "run", resume=True, live=live)
    assert not any("resuming" in sentence for sentence in live.said), live.said


def test_resume_where_nothing_was_begun_begins(tmp_path, train_toy, assert_same_run):
    train_toy(tmp_path / "whole")
    train_toy(tmp_path / "new" / "deep", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "new" / "deep")


def test_equal_runs_write_equal_weight_files(tmp_path, train_toy):
    """Byte for byte, the header too, so that a checksum tells whether two runs ended alike."""
    files = set()
    for number in range(6):
        train_toy(tmp_path / str(number), "standard", {"training.epochs": 1})
        files.add((tmp_path / str(number) / "model.safetensors").read_bytes())
    assert len(files) == 1


def test_the_saved_recipe_gives_the_same_run(tmp_path, train_toy, assert_same_run, toy_data, tiny_net):
    import atas

    train_toy(tmp_path / "first", values={"training.seed": 5})
    atas.train(tmp_path / "first" / "recipe.toml", out=tmp_path / "second", data=toy_data, model=tiny_net())
    assert_same_run(tmp_path / "first", tmp_path / "second")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("training.epochs", 4),
        ("training.batch_size", 8),
        ("training.seed", 1),
        ("training.ema", 0.5),
        ("method.eps", 0.2),
        ("method.c", 2.0),
        ("method.name", "atta"),
        ("schedule.peak", 0.1),
        ("optimizer.momentum", 0.8),
        ("data.pad", 2),
        ("engine.sync_batchnorm", True),
    ],
)
def test_a_changed_recipe_is_refused_by_name(key, value, tmp_path, train_toy, interrupt_after, assert_same_run):
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "run", live=interrupt_after(6))
    kept = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match=rf"started with another recipe \({key}: .* became .*--resume --out"):
        train_toy(tmp_path / "run", values={key: value}, resume=True)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == kept


def test_another_model_is_a_changed_recipe(tmp_path, train_toy, interrupt_after):
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "run", live=interrupt_after(6))
    with pytest.raises(UsageError, match=r"model\.name: given:TinyNet became given:Sequential"):
        train_toy(tmp_path / "run", model=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3)), resume=True)


def test_where_things_are_and_what_comes_after_may_change(tmp_path, train_toy, interrupt_after, assert_same_run):
    train_toy(tmp_path / "whole")
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "parts", live=interrupt_after(6))
    values = {
        "data.root": "elsewhere",
        "engine.device": "auto" if not torch.cuda.is_available() else "cpu",
        "engine.precision": "float32",
        "evaluation.attacks": ("pgd10",),
        "training.checkpoint_every": 0.0,
    }
    train_toy(tmp_path / "parts", values=values, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
