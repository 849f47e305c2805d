"""Studies on a device that is not the host: nothing may mix the two. There need be no GPU for that."""

import functools

import pytest
import torch
from helpers.fake_device import FakeTensor, capturing, fake_device, work_elsewhere

from atas.evaluation import backend
from atas.paper.measurements import Deciles, LossSurfaces, RobustLoss, StepGap, default_measurements
from atas.paper.subsets import NormSubset
from atas.sweeps import Plan, Store, execute
from atas.training import build

RANKING = {"method.c": 1e9, "method.beta": 0.0, "method.max_step": 0.25}


@pytest.fixture
def elsewhere(monkeypatch):
    """All that is trained and measured inside of it is on the other device."""
    return functools.partial(work_elsewhere, monkeypatch, backend, build, execute)


def test_the_fake_device_refuses_what_a_gpu_refuses():
    with fake_device() as device:
        x, host = torch.arange(6.0, device=device), torch.ones(6)
        assert x.device == device == torch.ones_like(x).device
        assert (x * 2)[torch.tensor([1, 2])].tolist() == [2, 4]  # the host's indices are taken
        assert float((x + torch.tensor(1.0)).sum()) == 21  # and so are its numbers
        assert (x.cpu() + host).sum() == 21
        for mixed in (lambda: x + host, lambda: host[x.long()], lambda: x.index_add(0, torch.arange(6), x)):
            with pytest.raises(RuntimeError, match="two devices"):
                mixed()
        with pytest.raises(RuntimeError, match="numpy"):
            x.numpy()
        exchanges = {
            "a value that is read": lambda: float(x.sum()),
            "a list": x.tolist,
            "a branch": lambda: bool(x.any()),
            "a size that depends on values": lambda: x[x > 2],
            "a copy to the host": lambda: x.cpu(),
            "a copy from the host": lambda: host.to(device),
            "a tensor of numbers": lambda: torch.tensor([1.0], device=device),
            "an index of the host": lambda: x[torch.tensor([1])],
        }
        for exchange in exchanges.values():
            exchange()
            with capturing(), pytest.raises(RuntimeError, match="a CUDA graph cannot record"):
                exchange()
        with capturing():
            assert (x[torch.arange(2, device=device)] * 2 + torch.zeros(2, device=device)).device == device


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*meta")  # loading weights there would be a no-op, were it real
def test_a_plan_with_all_observations_comes_to_the_same_elsewhere(tiny, tmp_path, quiet, elsewhere):
    ranks = tiny("fgsm-rs-adaptive", RANKING, attacks=(), measurements=(Deciles(),))
    measurements = (RobustLoss(30), StepGap((0.1, 0.2), 30), LossSurfaces(ranks, images=10, points=2))
    trials = [
        ranks,
        tiny("atas", attacks=("pgd2",), measurements=measurements),
        tiny("atas", padding=2),
        tiny("atas", attacks=(), subset=NormSubset(ranks, 1, 3)),
        tiny("atas", held_out=100),
    ]
    here, there = Store(tmp_path / "here"), Store(tmp_path / "there")
    assert Plan(trials, here, default_measurements).run(quiet) == []
    with elsewhere():
        plan = Plan(trials, there, default_measurements)
        assert plan.run(quiet) == []
    for trial in trials:
        expected, found = here.record(trial), there.record(trial)
        assert (found.weights, found.n) == (expected.weights, expected.n)
        assert {k: v["right"] for k, v in found.attacks.items()} == {k: v["right"] for k, v in expected.attacks.items()}
        for name, seen in expected.observed.items():
            again = found.observed[name]
            assert {k: v for k, v in again.items() if k != "environment"} == {
                k: v for k, v in seen.items() if k != "environment"
            }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*meta")
def test_models_are_left_where_the_recipe_wants_them(tiny, store, quiet, elsewhere):
    """Those that were just trained, and those that were read from a file."""
    seen = []

    class Watched(RobustLoss):
        def measure(self, training):
            seen.append({type(tensor) for tensor in training.model.state_dict().values()})
            return super().measure(training)

    with elsewhere():
        for padding in (0, 2):
            trial = tiny("atta", padding=padding, measurements=(Watched(10),))
            assert Plan([trial], store, default_measurements).run(quiet) == []
    assert seen == [{FakeTensor}, {FakeTensor}]
