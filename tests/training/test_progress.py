"""What a person sees: a moving line in a terminal, plain lines elsewhere."""

import re

import pytest
import torch

from atas._utils import environment
from atas.training import TrainingProgress

DEVICE = environment.environment_info(torch.device("cpu"))["device"]


def test_plain_lines_without_a_terminal(tmp_path, train_toy, observer):
    live = observer(force_terminal=False)
    train_toy(tmp_path / "run", live=live)
    first, *lines, last = live.out.getvalue().splitlines()
    assert re.fullmatch(r"time: .*\d+\.\d s training.*", last)
    assert first == f"toy: atas, Linf(0.1), 60 images of toy x 3; {DEVICE}, eager in float32; into {tmp_path / 'run'}"
    assert [line.split("  ")[0] for line in lines] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    for line in lines:
        for part in ("loss ", "clean ", "FGSM ", "PGD-10 ", "step 0.", "examples/s"):
            assert part in line
    assert lines[0].endswith(" left")
    assert not lines[-1].endswith(" left")
    assert "\x1b" not in live.out.getvalue()


def test_plain_lines_inside_of_long_epochs(tmp_path, train_toy, observer, monkeypatch):
    monkeypatch.setattr(TrainingProgress, "plain_interval", 0.0)
    live = observer(force_terminal=False)
    train_toy(tmp_path / "run", live=live)
    lines = live.out.getvalue().splitlines()
    steps = [line for line in lines if " of 12 steps  loss" in line]
    assert len(steps) == 12
    assert steps[0].startswith("epoch 1/3  1 of 12 steps  loss ")
    assert "PGD-10" not in steps[0]
    assert "PGD-10" in steps[-1]
    assert all(line.endswith(" left") for line in steps)


def test_how_far_the_decoding_is(observer, monkeypatch):
    live = observer(force_terminal=False)
    live.data_loading("decoding images", 0, 999)  # over in a moment
    live.data_loading("decoding images", 0, 13_394)
    live.data_loading("decoding images", 64, 13_394)
    monkeypatch.setattr(TrainingProgress, "plain_interval", 0.0)
    live.data_loading("decoding images", 128, 13_394)
    lines = ["decoding images: 0 of 13,394", "decoding images: 128 of 13,394"]
    assert live.out.getvalue().splitlines() == lines


def test_long_lines_are_not_broken(tmp_path, train_toy, observer):
    live = observer(force_terminal=False, width=40)
    train_toy(tmp_path / "run", live=live)
    assert len(live.out.getvalue().splitlines()) == 5


@pytest.mark.slow
def test_a_progress_bar_in_a_terminal(tmp_path, train_toy, observer, monkeypatch):
    monkeypatch.setattr(TrainingProgress, "refresh_interval", 0.0)
    live = observer(force_terminal=True, color_system="truecolor")
    train_toy(tmp_path / "run", live=live)
    shown = live.out.getvalue()
    assert "\x1b[" in shown
    assert "━" in shown
    assert "toy" in shown
    assert "%" in shown
    assert "epoch 3/3" in shown
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1, "the cursor is hidden once and shown again"


def test_the_terminal_is_given_back_when_training_fails(tmp_path, train_toy, observer):
    class OutOfLuckError(Exception):
        pass

    def fail(seen):
        raise OutOfLuckError

    live = observer(on_batch=fail, force_terminal=True)
    with pytest.raises(OutOfLuckError):
        train_toy(tmp_path / "run", live=live)
    shown = live.out.getvalue()
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1


def test_square_brackets_in_a_path_are_no_markup(tmp_path, train_toy, interrupt_after, observer):
    from atas.training.trainer import Interrupted

    folder = tmp_path / "run[bold]"
    with pytest.raises(Interrupted):
        train_toy(folder, live=interrupt_after(2))
    live = observer()
    train_toy(folder, live=live, resume=True)
    assert f"resuming {folder} at epoch 1, batch 3" in live.out.getvalue()


@pytest.mark.parametrize(
    ("size", "in_levels", "text"),
    [(8 / 255, True, "step 8.0/255"), (0.1, False, "step 0.100"), (0.2, True, "51.0/255")],
)
def test_step_sizes_are_written_as_people_write_them(size, in_levels, text, observer):
    live = observer(force_terminal=False)
    live.start("toy", 10, 0, in_levels=in_levels)
    live.end_epoch(5, {"epoch": 0, "loss": 1.0, "step_size": size}, 2)
    assert text in live.out.getvalue()


@pytest.mark.parametrize(("eps", "text"), [(8 / 255, "/255"), (0.5 / 255, "/255"), (0.1, "step 0.")])
def test_step_sizes_have_the_unit_of_the_budget_in_a_whole_training(eps, text, tmp_path, observer, train_toy):
    live = observer(force_terminal=False)
    train_toy(tmp_path / "run", live=live, values={"method.eps": eps})
    lines = [line for line in live.out.getvalue().splitlines() if line.startswith("epoch")]
    assert lines
    assert [line for line in lines if text not in line] == []


def test_time_left_counts_from_where_the_run_was_taken_up(observer):
    now = [100.0]
    live = observer(clock=lambda: now[0], force_terminal=False)
    live.start("toy", 1000, 900)
    now[0] += 10  # ten steps in ten seconds, ninety to go
    live.update(910, 9, 10, loss=1.0)
    assert live.out.getvalue().strip() == "epoch 10/10  910 of 1,000 steps  loss 1.000  1:30 left"
    live.start("toy", 100_000, 0)
    now[0] += 1
    live.update(10, 0, 10, loss=1.0)
    assert live.out.getvalue().strip().endswith("2:46:39 left")


def test_the_look_at_the_end_of_an_epoch_is_not_the_pace_of_its_steps(observer):
    """A run that was taken up one step before the end of an epoch has made one step, and a long look, by then."""
    now = [100.0]
    live = observer(clock=lambda: now[0], force_terminal=False)
    live.start("toy", 1000, 899)
    now[0] += 1
    with live.timing("monitor"):
        now[0] += 30
    live.end_epoch(900, {"epoch": 8, "loss": 1.0}, 10)
    assert live.out.getvalue().strip().endswith("2:10 left")  # a hundred steps of a second, and a look
    now[0] += 10
    live.update(910, 9, 10, loss=1.0)
    assert live.out.getvalue().strip().endswith("2:00 left")


def test_the_bar_follows_epochs_that_are_too_short_to_look_into(observer):
    live = observer(force_terminal=True)
    with live:
        live.start("toy", 12, 0)
        for epoch in range(3):
            live.end_epoch(4 * (epoch + 1), {"epoch": epoch, "loss": 1.0}, 3)
        task = live.bar.tasks[0]
        assert task.completed == 12
        assert task.fields["text"] == "epoch 3/3 done"


@pytest.mark.parametrize("width", [60, 80])
def test_a_narrow_terminal_shows_how_far_it_is_and_how_long_it_takes(width, observer):
    live = observer(force_terminal=True, color_system=None, width=width)
    with live:
        live.start("a-recipe-with-a-name-of-usual-length", 11730, 0)
        live.update(2000, 5, 30, loss=1.234, clean=0.7, pgd10=0.4, step_size=8 / 255, examples_per_second=1234)
        live.bar.refresh()
    line = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", live.out.getvalue()).rpartition("\r")[0].split("\r")[-1].strip()
    assert re.match(r"━.* 17% [-:\d]+ epoch 6/30  loss 1.234  step 8.0/25", line), line
    assert len(line) <= width
