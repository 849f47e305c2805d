"""Averaged weights: equal to a slow reference, and what a run ends with."""

import pytest
import torch

import atas
from atas.training import Run, checkpoint


def follow(snapshots, decay):
    """The average by its definition: a small decay at first, then the given one; in float64."""
    average = {name: value.double() for name, value in snapshots[0].items()}
    for t, state in enumerate(snapshots[1:]):
        share = min(decay, (1 + t) / (10 + t))
        for name, value in state.items():
            if value.dtype.is_floating_point:
                average[name] = share * average[name] + (1 - share) * value.double()
            else:
                average[name] = value.double()
    return average


def train_watched(out, train_toy, observer, net, decay):
    """A run and the model's state before and after every update."""

    def state():
        return {name: value.clone() for name, value in net.state_dict().items()}

    snapshots = [state()]
    live = observer(on_batch=lambda seen: snapshots.append(state()))
    run = train_toy(out, values={"training.ema": decay, "training.epochs": 6}, model=net, live=live)
    assert len(snapshots) == 1 + 24
    return run, snapshots


@pytest.mark.parametrize("decay", [0.5, 0.999])
def test_the_average_equals_a_slow_reference(decay, tmp_path, train_toy, observer, tiny_net):
    run, snapshots = train_watched(tmp_path / "run", train_toy, observer, tiny_net(), decay)
    expected = follow(snapshots, decay)
    found = run.model.state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value, rtol=1e-5, atol=1e-6)
    assert int(found["bn1.num_batches_tracked"]) == int(snapshots[-1]["bn1.num_batches_tracked"]) > 0
    assert found["bn1.num_batches_tracked"].dtype == torch.int64


def test_tied_weights_are_averaged_once(tmp_path, train_toy, observer, tied_net):
    run, snapshots = train_watched(tmp_path / "run", train_toy, observer, tied_net(), 0.9)
    expected = follow(snapshots, 0.9)
    for name, value in expected.items():
        torch.testing.assert_close(run.model.state_dict()[name].double(), value, rtol=1e-5, atol=1e-6)


def test_the_run_ends_with_the_averaged_weights(tmp_path, train_toy, tiny_net):
    net = tiny_net()
    run = train_toy(tmp_path / "run", values={"training.ema": 0.9}, model=net)
    tensors, _ = checkpoint.load(tmp_path / "run" / "checkpoints" / "last.safetensors")
    for name, tensor in run.model.state_dict().items():
        assert torch.equal(tensor, tensors[f"ema.model.{name}"])
    assert not torch.equal(run.model.fc.weight, tensors["model.fc.weight"])
    assert torch.equal(net.fc.weight, tensors["model.fc.weight"])
    loaded = Run.load(tmp_path / "run", model=tiny_net(seed=1))
    assert torch.equal(loaded.model.fc.weight, run.model.fc.weight)
    assert not run.model.training


def test_averaging_does_not_change_the_training(tmp_path, train_toy):
    train_toy(tmp_path / "with", values={"training.ema": 0.9})
    train_toy(tmp_path / "without")
    one, other = (
        checkpoint.load(tmp_path / name / "checkpoints" / "last.safetensors")[0] for name in ("with", "without")
    )
    for name, tensor in other.items():
        assert torch.equal(tensor, one[name]), name
    assert not any(name.startswith("ema.") for name in other)


def test_free_is_averaged_after_every_update(tmp_path, train_toy):
    train_toy(tmp_path / "run", "free", {"training.ema": 0.9, "method.replays": 3, "training.epochs": 1})
    tensors, state = checkpoint.load(tmp_path / "run" / "checkpoints" / "last.safetensors")
    assert int(tensors["ema.updates"]) == state["updates"] == 12


def test_averaged_weights_of_a_named_model_come_back(tmp_path, toy_data, toy_recipe):
    settings = toy_recipe("fgsm", {"training.ema": 0.9, "training.epochs": 1})
    run = atas.train(settings, out=tmp_path / "run", data=toy_data)
    again = Run.load(tmp_path / "run")
    for name, tensor in again.model.state_dict().items():
        assert torch.equal(tensor, run.model.state_dict()[name])
