"""An epoch's row: quantiles and decile means of step sizes and gradient norms, and the warning of long steps."""

import io
import json
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import atas
from atas.training import TrainingProgress
from atas.training.metrics import QUANTILES, decile_means, quantiles
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
    row = {"epoch": 2, "step_size_by_tenth": [8.0] * 9 + [shortest * 8 / 255]}
    assert bool(step_size_warning(row, 8 / 255)) is fires
    assert step_size_warning(row | {"epoch": 1}, 8 / 255) is None
    assert step_size_warning({"epoch": 9}, 8 / 255) is None  # a method without such steps


@pytest.mark.slow
@pytest.mark.parametrize(("eps", "times"), [(2 / 255, 1), (0.39, 0)])
def test_warning_of_too_long_steps_is_printed_once(tmp_path, eps, times):
    said = io.StringIO()
    live = TrainingProgress(Console(file=said, width=400))
    atas.train("digits-small-cnn-atas", out=tmp_path / "run", values=SMALL | {"method.eps": eps}, live=live)
    assert said.getvalue().count("Steps are too long to adapt") == times
