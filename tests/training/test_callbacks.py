"""Observers see every step and change none; rows choose what is learnt from, not what is watched."""

import pytest
import torch
from safetensors.torch import load_file

import atas
from atas.data import Dataset, Split
from atas.errors import CheckpointError
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


def test_the_monitor_watches_all_images(train_on, tmp_path, monkeypatch):
    from atas.training.monitor import Monitor

    watched, probe = set(), Monitor.probe

    def spy(self, model, ask):
        watched.add(tuple(self.images.flatten(1).sum(1).tolist()))
        return probe(self, model, ask)

    monkeypatch.setattr(Monitor, "probe", spy)
    train_on(tmp_path / "rows", rows=torch.arange(5))
    train_on(tmp_path / "all")
    assert len(watched) == 1


def test_a_run_does_not_go_on_with_other_rows(train_on, interrupt_after, tmp_path):
    with pytest.raises(Interrupted):
        train_on(tmp_path / "run", rows=torch.arange(40), live=interrupt_after(2))
    with pytest.raises(CheckpointError, match="other training images"):
        train_on(tmp_path / "run", rows=torch.arange(20, 60), resume=True)
    train_on(tmp_path / "run", rows=torch.arange(40), resume=True)
