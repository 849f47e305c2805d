"""Norms by epoch: what is written is what the attack saw, and a fixed step with remembered norms is the fixed step."""

import json
import signal

import pytest
import torch
from safetensors.torch import load_file, save_file

import atas
from atas import recipes
from atas.core.rng import CounterRNG
from atas.errors import DataError
from atas.paper import gradient_norms
from atas.paper.snapshots import SnapshotRecorder, list_snapshots
from atas.threat import l2_norm
from atas.training import TrainingProgress
from atas.training.build import build_model
from atas.training.callbacks import StepInfo
from atas.training.trainer import Interrupted

QUIET = {"engine.device": "cpu", "training.probe": 20}


def run(folder, method, values, observers=(), **options):
    settings = recipes.load(f"digits-small-cnn-{method}").with_values({**QUIET, **values})
    with TrainingProgress(quiet=True) as live:
        return atas.train(settings, out=folder, live=live, observers=observers, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "twin"), [("fgsm-rs", "fgsm-rs-adaptive"), ("atta", "atas-literal")])
def test_a_fixed_twin_trains_the_same_weights(method, twin, tmp_path):
    """Else norms would be of another training than the one that they are said to be of."""
    short = {"training.epochs": 2, "training.batch_size": 256, "method.eps": 0.25}
    if method == "atta":
        short["method.reset_every"] = 2
    fixed = {f"method.{key}": value for key, value in gradient_norms.FIXED_STEP.items()} | {"method.max_step": 0.3}
    run(tmp_path / "fixed", method, {**short, "method.step_size": 0.3})
    observer = gradient_norms.EpochNorms(tmp_path / "norms")
    run(tmp_path / "twin", twin, {**short, **fixed}, [observer])
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("fixed", "twin"))
    assert all(torch.equal(first[key], second[key]) for key in first)
    found, sizes = gradient_norms.read_norms(tmp_path / "norms", 2)
    assert found.shape == sizes.shape == (2, 1297)
    assert torch.equal(sizes, torch.full_like(sizes, 0.3))


@pytest.mark.slow
def test_a_norm_is_that_of_the_gradient_at_the_random_start(tmp_path):
    """One batch holds all images, so all norms of the first epoch are of the initial weights."""
    fixed = {f"method.{key}": value for key, value in gradient_norms.FIXED_STEP.items()} | {"method.max_step": 0.3}
    values = {"training.epochs": 1, "training.batch_size": 1297, **fixed}
    finished = run(tmp_path / "run", "fgsm-rs-adaptive", values, [gradient_norms.EpochNorms(tmp_path / "norms")])
    (found,), _ = gradient_norms.read_norms(tmp_path / "norms", 1)

    digits = atas.data.load("digits")
    model = build_model(finished.recipe, digits).train()
    x, y = digits.train.images.float() / 255, digits.train.labels
    start = finished.recipe.threat.random_start(x, CounterRNG(0, torch.tensor(0), torch.arange(1297))).requires_grad_(
        True
    )
    (gradient,) = torch.autograd.grad(torch.nn.functional.cross_entropy(model(start), y, reduction="sum"), start)
    assert torch.allclose(found, l2_norm(gradient).flatten(), rtol=1e-3, atol=1e-6)


class Stop:
    """Asks the training to stop, as a person does, in the middle of its second epoch."""

    def due(self, moment):
        return (moment.epoch, moment.batch) == (1, 2)

    def on_step_end(self, moment, engine):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
def test_norms_survive_a_stop(tmp_path):
    values = {"training.epochs": 3, "training.batch_size": 400}
    run(tmp_path / "whole", "atas", values, [gradient_norms.EpochNorms(tmp_path / "a")])
    with pytest.raises(Interrupted):
        run(tmp_path / "stopped", "atas", values, [gradient_norms.EpochNorms(tmp_path / "b"), Stop()])
    assert not gradient_norms.has_norms(tmp_path / "b", 2)
    run(tmp_path / "stopped", "atas", values, [gradient_norms.EpochNorms(tmp_path / "b")], resume=True)
    for one, other in zip(
        gradient_norms.read_norms(tmp_path / "a", 3), gradient_norms.read_norms(tmp_path / "b", 3), strict=True
    ):
        assert torch.equal(one, other)


def test_missing_epochs_are_told(tmp_path):
    assert not gradient_norms.has_norms(tmp_path, 1)
    with pytest.raises(DataError, match="lacks gradient norms of some of 3 epochs"):
        gradient_norms.read_norms(tmp_path, 3)


def test_a_summary_leaves_out_the_warm_up(generator):
    found = torch.rand(4, 300, generator=generator) + 0.5
    found[:2] = 0
    sizes = torch.rand(4, 300, generator=generator)
    seen = gradient_norms.summary(found, sizes)
    mean = found[2:].double().mean(0)
    assert seen["epochs"] == [3, 4]
    assert seen["tail"]["mean"] == pytest.approx(gradient_norms.tail(mean))
    assert seen["tail"]["largest"] == pytest.approx(gradient_norms.tail(found[2:].max(0).values))
    assert seen["tail"]["last"] == pytest.approx(gradient_norms.tail(found[3]))
    assert seen["average"]["step_size"] == pytest.approx(sizes[2:].double().mean().item())
    assert sum(seen["histogram"]["counts"]) == 300
    assert len(seen["norm_by_tenth"]) == len(seen["step_by_tenth"]) == 2
    hardest = mean.argsort()[-30:]
    assert seen["norm_by_tenth"][1][9] == pytest.approx(found[3, hardest].mean().item(), rel=1e-4)


def test_a_training_that_was_all_warm_up_has_a_summary_too():
    found = gradient_norms.summary(torch.zeros(2, 50), torch.full((2, 50), 0.1))
    assert found["epochs"] == [1, 2]
    assert found["average"] == {"norm": 0.0, "step_size": pytest.approx(0.1)}
    assert found["tail"] == {"mean": 1.0, "largest": 1.0, "last": 1.0}
    assert json.loads(json.dumps(found, allow_nan=False)) == found


# Weights on the way


class Weights:
    """As much of an engine as snapshots need."""

    def __init__(self):
        self.final_model = torch.nn.Linear(2, 2)


def test_snapshots_stay_around_a_collapse(tmp_path):
    observer, engine = SnapshotRecorder(tmp_path, an_epoch=2, before=3, after=2), Weights()
    for epoch in range(6):
        for batch in range(1, 11):
            moment = StepInfo(epoch, batch, 10, collapsed=epoch >= 4)
            if observer.due(moment):
                with torch.no_grad():
                    engine.final_model.weight.fill_(moment.step)
                observer.on_step_end(moment, engine)
    found = list_snapshots(tmp_path)
    assert [(shot.step, shot.collapsed) for shot in found] == [
        (30, False),
        (35, False),
        (40, False),
        (45, True),
        (50, True),
    ]
    assert found[0].load_into(torch.nn.Linear(2, 2)).weight.tolist() == [[30.0, 30.0]] * 2
    assert observer.complete(6)


def test_snapshots_of_an_attempt_that_was_cut_off_go(tmp_path):
    """It had collapsed, and the training that begins anew collapses later."""
    observer, engine = SnapshotRecorder(tmp_path, an_epoch=2, before=3, after=2), Weights()
    for collapse in (1, 3):
        for epoch in range(collapse + 1):
            for batch in (5, 10):
                moment = StepInfo(epoch, batch, 10, collapsed=epoch >= collapse)
                assert observer.due(moment)
                observer.on_step_end(moment, engine)
    found = [(shot.step, shot.collapsed) for shot in list_snapshots(tmp_path)]
    assert found == [(20, False), (25, False), (30, False), (35, True), (40, True)]


def test_without_a_collapse_the_last_snapshots_stay(tmp_path):
    observer, engine = SnapshotRecorder(tmp_path, an_epoch=4, before=2), Weights()
    for batch in range(1, 4):
        moment = StepInfo(0, batch, 3)
        assert observer.due(moment)  # epochs of fewer batches than snapshots
        observer.on_step_end(moment, engine)
    assert [shot.step for shot in list_snapshots(tmp_path)] == [2, 3]
    assert observer.complete(1)
    assert not observer.complete(2)  # of a longer training, its end is missing


@pytest.mark.parametrize("unseen", [range(6), range(12, 14), range(18, 21)])
def test_snapshots_tell_of_moments_that_nobody_saw(tmp_path, unseen):
    """Before the first, in between, and at the end."""
    observer, engine = SnapshotRecorder(tmp_path, an_epoch=2, before=30), Weights()
    assert not observer.complete(5)
    for step in range(1, 21):
        moment = StepInfo((step - 1) // 4, (step - 1) % 4 + 1, 4)
        if step not in unseen and observer.due(moment):
            observer.on_step_end(moment, engine)
    assert not observer.complete(5)


def test_snapshots_that_do_not_say_how_long_an_epoch_is_are_not_complete(tmp_path):
    observer = SnapshotRecorder(tmp_path)
    observer.on_step_end(StepInfo(0, 1, 1), Weights())
    assert observer.complete(1)
    (shot,) = list_snapshots(tmp_path)
    save_file(load_file(shot.path), shot.path)
    assert not observer.complete(1)
