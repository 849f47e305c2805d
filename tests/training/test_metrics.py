"""An epoch's row: quantiles and decile means of step sizes and gradient norms, and the warning of long steps."""

import io
import json
import math
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
from atas.training.metrics import QUANTILES, MetricsFile, decile_means, missing_epochs, quantiles, read_metrics
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
    """Every byte in turn, in two ways, of rows without a checksum: an error, or the same collapse as before."""
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


# Checksums

EVENTS = [
    {"event": "breakdown", "epoch": 1, "clean": 0.1},
    {"event": "rollback", "epoch": 3, "to_epoch": 2, "step_scale": 0.75},
    {"event": "stop", "epoch": 3, "to_epoch": 2},
    {"event": "resume", "epoch": 2, "device": "cpu (x)", "cuda": None, "processes": 2},
    {"event": "diverged", "epoch": 3},
]


def write(path, rows):
    """Write rows as a training does, and return the bytes of the file."""
    path.unlink(missing_ok=True)
    file = MetricsFile(path)
    for row in rows:
        file.write(row)
    return path.read_bytes()


def rows_with_events():
    """Rows of all kinds; values that JSON writes in special ways too."""
    first, *others = rows_of_run()
    first |= {"loss": 1e-30, "pgd10_loss": None, "step_sizes": [0.1, math.inf], "rate": 3.0000000000000004}
    return [first, *others, *EVENTS]


def test_written_rows_have_a_checksum_that_is_not_handed_on(tmp_path):
    path, rows = tmp_path / "metrics.jsonl", rows_with_events()
    lines = [json.loads(line) for line in write(path, rows).splitlines()]
    assert [list(line) for line in lines] == [[*row, "checksum"] for row in rows]
    assert read_metrics(path, finished=True) == rows
    assert not any("checksum" in row for row in rows), "the rows that loggers get are not changed"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A path, and the content of a file of metrics that was there."""
    path = tmp_path_factory.mktemp("written") / "metrics.jsonl"
    return path, write(path, rows_with_events())


def with_byte(content, place, byte):
    return content[:place] + bytes([byte]) + content[place + 1 :]


@given(place=st.integers(0, 10**6), byte=st.integers(0, 255))
def test_another_byte_is_an_error_or_leaves_the_rows_as_they_are(place, byte, written):
    path, content = written
    path.write_bytes(with_byte(content, place % len(content), byte))
    with suppress(DataError):
        assert read_metrics(path, finished=True) == rows_with_events()


@pytest.mark.slow
@pytest.mark.parametrize("finished", [False, True])
def test_no_flipped_bit_is_passed_over(finished, written):
    path, content = written
    for place in range(len(content)):
        for bit in (0, 2, 4, 7):
            path.write_bytes(with_byte(content, place, content[place] ^ 1 << bit))
            with suppress(DataError):
                assert read_metrics(path, finished=finished) == rows_with_events(), (place, bit)


@pytest.mark.slow
def test_a_changed_digit_is_an_error(written):
    """Unless it leaves the value as it is, as in the last place of a long number."""
    path, content = written
    same = 0
    for place in (place for place, byte in enumerate(content) if byte in b"0123456789"):
        for digit in set(b"0123456789") - {content[place]}:
            path.write_bytes(changed := with_byte(content, place, digit))
            if is_same_json(changed, content):
                same += 1
                continue
            with pytest.raises(DataError, match=r"are damaged \("):
                read_metrics(path)
    assert same < 5


def is_same_json(one, other):
    try:
        return [json.loads(line) for line in one.splitlines()] == [json.loads(line) for line in other.splitlines()]
    except ValueError:
        return False


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (b'"pgd10": 0.0', b'"pgd10": 0.4', "line 2: its checksum is wrong"),
        (b'"collapsed": true', b'"collapsed": false', "line 2: its checksum is wrong"),
        (b'"checksum": "', b'"checksum": "0', "line 2: its checksum is wrong"),
        (b'"checksum": "', b'"checksum": [], "was": "', "line 2: its checksum is wrong"),
        (b'"checksum": "', b'"checksul": "', "line 2: the key 'checksul' is unknown"),
        (b'"seconds"', b'"shown": 32, "seconds"', "line 2: its checksum is wrong"),
        (b'"seconds"', b'"more": ' + b"[" * 900 + b"]" * 900 + b', "seconds"', "line 2: "),
    ],
)
def test_a_row_that_does_not_fit_its_checksum(old, new, why, tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = write(path, rows_of_run()).splitlines(keepends=True)
    assert old in lines[1]
    lines[1] = lines[1].replace(old, new)
    path.write_bytes(b"".join(lines))
    for finished in (False, True):
        with pytest.raises(DataError, match=rf"the metrics .* are damaged \({why}.*restore the file from a copy"):
            read_metrics(path, finished=finished)


def test_a_changed_last_row_of_an_unfinished_run_was_not_cut_off_by_a_kill(tmp_path):
    path = tmp_path / "metrics.jsonl"
    content = write(path, rows_of_run())
    path.write_bytes(content.replace(b'"seconds": 4.0', b'"seconds": 5.0').removesuffix(b"\n"))
    with pytest.raises(DataError, match=r"are damaged \(line 5: its checksum is wrong\)"):
        read_metrics(path)
    for cut in range(len(content.splitlines()[-1]) + 1):  # the end of the line too
        path.write_bytes(content[: len(content) - 1 - cut])
        assert read_metrics(path) == rows_of_run()[: 4 if cut else 5]


@pytest.mark.slow
def test_nesting_at_the_limit_of_the_parser_is_no_traceback(tmp_path):
    path = tmp_path / "metrics.jsonl"
    line = write(path, rows_of_run(1)).decode()
    for depth in range(600, 1100):
        path.write_text(line.replace('"seconds"', f'"more": {"[" * depth}{"]" * depth}, "seconds"'))
        with pytest.raises(DataError, match="are damaged"):
            read_metrics(path)


def test_rows_without_a_checksum_are_read(tmp_path):
    """Rows of earlier versions, and of a run that a later version continued."""
    path, rows = tmp_path / "metrics.jsonl", rows_with_events()
    path.write_bytes(text_of(rows))
    assert read_metrics(path, finished=True) == rows
    path.write_bytes(text_of(rows[:2]))
    file = MetricsFile(path, path.stat().st_size)
    for row in rows[2:]:
        file.write(row)
    assert not file.lost_rows
    assert path.read_bytes().startswith(text_of(rows[:2]))
    assert [b"checksum" in line for line in path.read_bytes().splitlines()] == [False] * 2 + [True] * (len(rows) - 2)
    assert read_metrics(path, finished=True) == rows
