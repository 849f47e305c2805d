"""Observers see every step and change none; rows choose what is learnt from, not what is watched."""

import pytest
import torch
from safetensors.torch import load_file

import atas
from atas.data import Dataset, Split
from atas.errors import CheckpointError, UsageError
from atas.training import ProbeResult
from atas.training.trainer import Interrupted


class Watch:
    """Keeps the moments at which it looked."""

    def __init__(self, every=1):
        self.every, self.moments, self.asked = every, [], 0

    def due(self, moment):
        self.asked += 1
        return moment.batch % self.every == 0

    def on_step_end(self, moment, engine):
        assert engine.method is not None
        self.moments.append(moment)


@pytest.fixture
def train_on(toy_recipe, toy_data, tiny_net, observer):
    """Train the tiny network on the toy data; its weights."""

    def train(out, data=toy_data, values=None, live=None, **options):
        settings = toy_recipe("fgsm-rs", values)
        atas.train(settings, out=out, model=tiny_net(), data=data, live=live or observer(), **options)
        return load_file(out / "model.safetensors")

    return train


def same(first, second):
    return all(torch.equal(first[name], second[name]) for name in first)


def test_observers_look_when_due_and_change_nothing(train_on, tmp_path):
    every, second = Watch(), Watch(2)
    assert same(train_on(tmp_path / "plain"), train_on(tmp_path / "watched", observers=[every, second]))
    assert [moment.step for moment in every.moments] == list(range(1, 13))
    assert [moment.epoch for moment in every.moments if moment.ends_epoch] == [0, 1, 2]
    assert [moment.step for moment in second.moments] == list(range(2, 13, 2))
    assert second.asked == 12
    assert not any(moment.collapsed for moment in every.moments)


def test_rows_are_learnt_from_as_if_there_were_no_others(train_on, toy_data, tmp_path):
    rows = torch.arange(5, 45)
    train = toy_data.train
    only = Dataset("part", Split(train.images[rows], train.labels[rows], train.classes), toy_data.test)
    assert same(train_on(tmp_path / "rows", rows=rows), train_on(tmp_path / "only", data=only))
    assert not same(load_file(tmp_path / "rows" / "model.safetensors"), train_on(tmp_path / "all"))


def test_the_monitor_probes_the_same_images_whatever_rows_are_trained_on(
    toy_data, train_toy, tied_net, rows_of, tmp_path
):
    """The weights do not move, so that other images would have another loss."""
    still = {"schedule.peak": 1e-30, "training.epochs": 1}
    seen = []
    for name, rows in (("few", torch.arange(5)), ("all", None)):
        train_toy(tmp_path / name, "fgsm-rs", still, model=tied_net(), rows=rows)
        (row,) = rows_of(tmp_path / name)
        seen.append({key: row[key] for key in ("clean", "fgsm", "pgd10", "pgd10_loss", "probe_gradient_norms")})
    assert seen[0] == seen[1]


def test_a_run_does_not_go_on_with_other_rows(train_on, interrupt_after, tmp_path):
    with pytest.raises(Interrupted):
        train_on(tmp_path / "run", rows=torch.arange(40), live=interrupt_after(2))
    with pytest.raises(CheckpointError, match="other training images"):
        train_on(tmp_path / "run", rows=torch.arange(20, 60), resume=True)
    train_on(tmp_path / "run", rows=torch.arange(40), resume=True)


def test_a_probe_of_the_caller_s_own_replaces_the_monitor_s(train_toy, rows_of, tmp_path):
    asked = []

    def probe(model):
        asked.append((model.training, any(weight.requires_grad for weight in model.parameters())))
        return ProbeResult(clean=0.9, fgsm=0.5, pgd10=0.5 - 0.2 * len(asked))

    run = train_toy(tmp_path / "run", probe=probe)
    assert asked == [(False, False)] * 3
    assert [row["pgd10"] for row in rows_of(tmp_path / "run") if "event" not in row] == pytest.approx([0.3, 0.1, -0.1])
    assert [row["collapsed"] for row in run.metrics] == [False, True, True]
    assert run.model.fc.weight.requires_grad


def test_a_probe_that_returns_something_else_is_refused(train_toy, tmp_path):
    with pytest.raises(UsageError, match=r"probe must return an atas.training.ProbeResult; got float"):
        train_toy(tmp_path / "run", probe=lambda model: 0.5)
