"""What is said of an epoch."""

import io

import pytest
from rich.console import Console

import atas
from atas.training import Live
from atas.training.rows import too_long

SMALL = {"training.batch_size": 128, "training.probe": 50, "engine.device": "cpu", "training.epochs": 4}


@pytest.mark.parametrize(("shortest", "fires"), [(1.9, False), (2.0, True), (5.2, True)])
def test_steps_that_cross_the_whole_ball(shortest, fires):
    row = {"epoch": 2, "step_size_by_tenth": [8.0] * 9 + [shortest * 8 / 255]}
    assert bool(too_long(row, 8 / 255)) is fires
    assert too_long(row | {"epoch": 1}, 8 / 255) is None
    assert too_long({"epoch": 9}, 8 / 255) is None  # a method without such steps


@pytest.mark.parametrize(("eps", "times"), [(2 / 255, 1), (0.39, 0)])
def test_it_is_said_once(tmp_path, eps, times):
    said = io.StringIO()
    live = Live(Console(file=said, width=400))
    atas.train("digits-small-cnn-atas", out=tmp_path / "run", values=SMALL | {"method.eps": eps}, live=live)
    assert said.getvalue().count("Steps are too long to adapt") == times
