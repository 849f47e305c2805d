"""The benchmark: what it reports is consistent and complete; the figures themselves are the machine's."""

import json

import pytest

from atas.training.bench import bench
from atas.training.recipe import load


@pytest.fixture(scope="module")
def results():
    recipe = load("digits-small-cnn-atas").with_values({"training.batch_size": 32, "engine.device": "cpu"})
    return {name: bench(recipe.with_values({"method.name": name}), steps=2) for name in ("atas", "standard", "trades")}


def test_times_are_ordered_and_add_up(results):
    for found in results.values():
        assert 0 < found.step.low <= found.step.median <= found.step.high
        assert found.step.steps == 10
        assert found.engine == "eager"
        assert found.eager == found.step
        assert sum(found.stages.values()) == pytest.approx(1)
        assert all(share > 0 for share in found.stages.values())
        assert found.training_seconds == pytest.approx(
            found.epoch_seconds * load("digits-small-cnn-atas").training.epochs
        )
        assert found.peak_memory > 2**20
        assert 0 < found.achieved < 1.5 * found.ceiling


def test_the_arithmetic_of_the_methods(results):
    """The attack of ATAS is a forward pass and an input gradient: two thirds of a training step more."""
    assert results["atas"].flop / results["standard"].flop == pytest.approx(5 / 3, rel=0.02)
    assert "attack" in results["atas"].stages
    assert "attack" not in results["trades"].stages  # its attack is part of its step


def test_the_result_is_json(results):
    found = json.loads(json.dumps(results["atas"].to_json()))
    assert found["step"]["median"] == results["atas"].step.median
    assert found["environment"]["torch"]
