"""An epoch's row: quantiles and decile means of step sizes and gradient norms, and the warning of long steps."""

import io
import json
import statistics
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import atas
from atas.errors import DataError
from atas.training import TrainingProgress
from atas.training.metrics import QUANTILES, decile_means, missing_epochs, quantiles, read_metrics
from atas.training.monitor import step_size_warning

SMALL = {"training.batch_size": 128, "training.probe": 50, "engine.device": "cpu", "training.epochs": 4}
VALUES = st.lists(st.floats(0, 100, width=32), min_size=1, max_size=60)


@given(VALUES)
def test_quantiles_are_values_at_their_rank(values):
    found = quantiles(torch.tensor(values))
    ordered = sorted(values)
    assert found == [ordered[round(share * (len(values) - 1))] for share in QUANTILES]


@given(VALUES)
def test_tenths_against_a_loop(norms):
    values = [float(place) for place in range(len(norms))]
    order = sorted(range(len(norms)), key=lambda place: norms[place])
    parts = min(10, len(norms))
    small, more = divmod(len(norms), parts)
    expected, first = [], 0
    for part in range(parts):
        size = small + (part < more)
        expected.append(statistics.fmean(values[place] for place in order[first : first + size]))
        first += size
    assert decile_means(torch.tensor(norms), torch.tensor(values)) == pytest.approx(expected)


def test_run_logs_step_sizes_and_gradient_norms_by_tenth(tmp_path, train_toy):
    """The 60 toy examples make tenths of six; the mean over all tenths is the mean over all examples."""
    run = train_toy(tmp_path / "run", "atas-literal")
    for row in run.metrics:
        assert json.loads(json.dumps(row)) == row
        for key in ("step_sizes", "gradient_norms", "probe_gradient_norms"):
            assert len(row[key]) == 5
            assert row[key] == sorted(row[key])
        assert len(row["step_size_by_tenth"]) == len(row["gradient_norm_by_tenth"]) == 10
        assert statistics.fmean(row["gradient_norm_by_tenth"]) == pytest.approx(row["gradient_norm"], rel=1e-5)
        assert statistics.fmean(row["step_size_by_tenth"]) == pytest.approx(row["step_size"], rel=1e-5)
        assert row["gradient_norm_by_tenth"] == sorted(row["gradient_norm_by_tenth"])
        # The step is inverse to the norm, so it falls from tenth to tenth.
        assert row["step_size_by_tenth"] == sorted(row["step_size_by_tenth"], reverse=True)


def test_other_methods_log_the_norms_of_the_probe(tmp_path, train_toy):
    run = train_toy(tmp_path / "run", "fgsm-rs")
    assert all(len(row["probe_gradient_norms"]) == 5 and row["probe_gradient_norms"][-1] > 0 for row in run.metrics)
    assert "step_sizes" not in run.metrics[0]


@pytest.mark.parametrize(("shortest", "fires"), [(1.9, False), (2.0, True), (5.2, True)])
def test_steps_that_cross_the_whole_ball(shortest, fires):
    norms = [1.0, 2.0, 3.0, 4.0, 5.0]
    row = {"epoch": 2, "step_size_by_tenth": [8.0] * 9 + [shortest * 8 / 255], "gradient_norms": norms}
    assert bool(step_size_warning(row, 8 / 255)) is fires
    assert step_size_warning(row | {"epoch": 1}, 8 / 255) is None
    assert step_size_warning({"epoch": 9}, 8 / 255) is None  # a method without such steps


@pytest.mark.parametrize(
    ("by_tenth", "norms", "fires"),
    [
        ([0.1, *[0.05] * 9], [1.0, 7.0, 40.0, 50.0, 60.0], True),  # the lower bound of the clip
        ([0.15] * 10, [0.1, 0.2, 0.3, 0.4, 0.5], True),  # the upper one
        ([0.15] * 9 + [0.14], [0.1, 0.2, 0.3, 0.4, 0.5], False),
        ([0.15] * 9 + [0.05], [0.1, 0.2, 0.3, 0.4, 0.5], False),
        ([0.1] * 10, [0.0] * 5, False),  # the warm-up
    ],
)
def test_steps_that_are_all_equal(by_tenth, norms, fires):
    row = {"epoch": 8, "step_size_by_tenth": by_tenth, "gradient_norms": norms}
    message = step_size_warning(row, 0.1)
    assert (message is not None) is fires
    assert step_size_warning(row | {"epoch": 7}, 0.1) is None
    if message is not None:
        assert f"whose median is {norms[2]:.3g}" in message


@pytest.mark.slow
@pytest.mark.parametrize(("eps", "times"), [(2 / 255, 1), (0.39, 0)])
def test_warning_of_too_long_steps_is_printed_once(tmp_path, eps, times):
    said = io.StringIO()
    live = TrainingProgress(Console(file=said, width=400))
    values = SMALL | {"method.eps": eps, "method.max_step": 0.78}
    atas.train("digits-small-cnn-atas", out=tmp_path / "run", values=values, live=live)
    assert said.getvalue().count("Steps are too long to adapt") == times


@pytest.mark.parametrize(("max_step", "times"), [("16/255", 1), ("2 eps", 0)])
def test_steps_that_do_not_fit_the_budget_are_said_at_the_start(tmp_path, train_toy, observer, max_step, times):
    live = observer()
    values = {"method.eps": 0.1, "method.max_step": max_step, "training.epochs": 1}
    train_toy(tmp_path / "run", "atas-literal", values, live=live)
    said = [text for text in live.said if text.startswith("method.max_step is 16/255, 0.627 times eps (0.1)")]
    assert len(said) == times


# Reading


def rows_of_run(epochs=4):
    """Rows of a run that collapsed in its second epoch."""
    rows = []
    for epoch in range(epochs):
        row = {"epoch": epoch, "updates": epoch + 1, "rate": 0.1, "loss": 1.0, "train_accuracy": 0.5, "clean": 0.5}
        rows.append(row | {"fgsm": 0.9, "pgd10": 0.0, "collapsed": epoch >= 1, "seconds": 1.0 + epoch})
    rows.insert(2, {"event": "collapse", "epoch": 1, "pgd10": 0.0, "fgsm": 0.9})
    return rows


def text_of(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.mark.slow
def test_a_damaged_byte_is_never_passed_over(tmp_path):
    """Every byte in turn, in two ways: an error, or as many rows and the same collapse as before."""
    path, content = tmp_path / "metrics.jsonl", text_of(rows_of_run())
    before = [row.get("collapsed") for row in rows_of_run()]
    for position in range(len(content)):
        for flip in (0x01, 0x80):
            path.write_bytes(content[:position] + bytes([content[position] ^ flip]) + content[position + 1 :])
            with suppress(DataError):
                rows = read_metrics(path, finished=True)
                assert [row.get("collapsed") for row in rows] == before, content[position - 9 : position + 9]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda lines: lines[1].replace(b"0.9", b"0.\xff"), "line 2: not JSON"),
        (lambda lines: lines[1][:40], "line 2: not JSON"),
        (lambda lines: b"", "line 2: not JSON"),
        (lambda lines: b"[" * 100_000, "line 2: .* nested too deeply"),
        (lambda lines: b"[]", "line 2: it is a list, not an object"),
        (lambda lines: lines[1].replace(b"true", b'"yes"'), "line 2: collapsed is 'yes', not true or false"),
        (lambda lines: lines[1].replace(b'"collapsed"', b'"collapse_"'), "line 2: 'collapsed' is missing"),
        (lambda lines: lines[1].replace(b'"epoch": 1', b'"epoch": 0'), "epoch 1 follows epoch 1"),
        (lambda lines: b'{"event": "collapsf", "epoch": 1}', "line 2: event is 'collapsf', not 'collapse'"),
        (lambda lines: b'{"event": "rollback", "epoch": 1}', "line 2: 'to_epoch' is missing"),
    ],
)
def test_a_damaged_line_is_an_error(change, why, tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = text_of(rows_of_run()).splitlines()
    lines[1] = change(lines)
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    for finished in (False, True):
        with pytest.raises(DataError, match=rf"the metrics .* are damaged \({why}.*restore the file from a copy"):
            read_metrics(path, finished=finished)


@pytest.mark.parametrize("cut", [1, 20, 100])
def test_a_last_line_that_a_kill_cut_off(cut, tmp_path):
    path, content = tmp_path / "metrics.jsonl", text_of(rows_of_run())
    path.write_bytes(content[:-cut])
    assert len(read_metrics(path)) == (5 if cut == 1 else 4)
    if cut > 1:
        with pytest.raises(DataError, match=r"are damaged \(line 5"):
            read_metrics(path, finished=True)


def test_rows_of_epochs_that_were_rolled_back(tmp_path):
    path, rows = tmp_path / "metrics.jsonl", rows_of_run(2)
    rows += [{"event": "rollback", "epoch": 1, "to_epoch": 1, "step_scale": 0.75}, *rows_of_run(4)[1:2]]
    path.write_bytes(text_of(rows))
    assert read_metrics(path) == rows


def test_rows_lost_before_a_resume_are_told(tmp_path, train_toy, interrupt_after, observer):
    with pytest.raises(atas.AtasError):
        train_toy(tmp_path / "run", live=interrupt_after(10))
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-9])  # in the middle of the second line
    live = observer()
    run = train_toy(tmp_path / "run", resume=True, live=live)
    assert [row["epoch"] for row in run.metrics] == [0, 2]
    assert missing_epochs(run.metrics) == [2]
    assert any("metrics.jsonl is shorter than it was at the checkpoint" in sentence for sentence in live.said)
