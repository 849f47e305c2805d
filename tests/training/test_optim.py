"""Averaged weights: equal to a slow reference, and what a run ends with."""

import pytest
import torch
from helpers.probes import COLLAPSED, HEALTHY, scripted_probe

import atas
from atas.distributed.sharding import DataShard
from atas.models.weights import load_weights
from atas.recipes import ScheduleConfig
from atas.training import Run, checkpoint
from atas.training.build import build
from atas.training.reestimation import reestimate_batchnorm
from atas.training.schedule import learning_rate, momentum_at
from atas.training.trainer import Interrupted


def follow(snapshots, decay, warmup=10):
    """The average by its definition: a small decay at first, then the given one, or one for each step; in float64."""
    average = {name: value.double() for name, value in snapshots[0].items()}
    for t, state in enumerate(snapshots[1:]):
        limit = decay[t] if isinstance(decay, list) else decay
        share = min(limit, (1 + t) / (warmup + t)) if warmup else limit
        for name, value in state.items():
            if value.dtype.is_floating_point:
                average[name] = share * average[name] + (1 - share) * value.double()
            else:
                average[name] = value.double()
    return average


def train_watched(out, train_toy, observer, net, decay, **values):
    """A run and the model's state before and after every update."""

    def state():
        return {name: value.clone() for name, value in net.state_dict().items()}

    snapshots = [state()]
    live = observer(on_batch=lambda seen: snapshots.append(state()))
    run = train_toy(out, values={"training.ema": decay, "training.epochs": 6, **values}, model=net, live=live)
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


def test_a_method_may_choose_the_decay_of_a_step(tmp_path, train_toy, observer, tiny_net, monkeypatch):
    net, usual, decays, snapshots = tiny_net(), atas.methods.FGSMPGK.average_decay, [], []

    def note(method, decay):
        decays.append(float(usual(method, decay)))
        snapshots.append({name: value.clone() for name, value in net.state_dict().items()})
        return usual(method, decay)

    first = {name: value.clone() for name, value in net.state_dict().items()}
    monkeypatch.setattr(atas.methods.FGSMPGK, "average_decay", note)
    values = {"training.ema": 0.3, "training.epochs": 6, "method.threshold": 0.95}
    run = train_toy(tmp_path / "run", "fgsm-pgk", values, model=net)
    assert len(decays) == 24
    assert min(decays) == pytest.approx(0.3)
    assert max(decays) > 0.9999
    for name, value in follow([first, *snapshots], decays).items():
        torch.testing.assert_close(run.model.state_dict()[name].double(), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("warmup", [0, 2, 40])
def test_the_warm_up_of_the_average(warmup, tmp_path, train_toy, observer, tiny_net):
    values = {"training.ema_warmup": warmup}
    run, snapshots = train_watched(tmp_path / "run", train_toy, observer, tiny_net(), 0.8, **values)
    for name, value in follow(snapshots, 0.8, warmup).items():
        torch.testing.assert_close(run.model.state_dict()[name].double(), value.double(), rtol=1e-5, atol=1e-6)


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


@pytest.mark.slow
def test_a_run_keeps_several_averages(tmp_path, train_toy, observer, tiny_net, interrupt_after, assert_same_run):
    """The first is the model of the run; the others have files of their own. All survive a stop."""
    decays, net = (0.9, 0.5), tiny_net()
    run, snapshots = train_watched(tmp_path / "run", train_toy, observer, net, decays)
    found = [run.model, Run.load(tmp_path / "run", model=tiny_net(seed=1)).model, load_second(tmp_path, tiny_net)]
    for model, decay in zip(found, (0.9, 0.9, 0.5), strict=True):
        for name, value in follow(snapshots, decay).items():
            torch.testing.assert_close(model.state_dict()[name].double(), value, rtol=1e-5, atol=1e-6)
    values = {"training.ema": decays, "training.epochs": 6}
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "parts", values=values, model=tiny_net(), live=interrupt_after(9))
    train_toy(tmp_path / "parts", values=values, model=tiny_net(), resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "parts")
    train_toy(tmp_path / "run", model=tiny_net(), overwrite=True)
    assert not list((tmp_path / "run").glob("model-ema-*"))


def load_second(folder, tiny_net):
    return load_weights(folder / "run" / "model-ema-0.5.safetensors", tiny_net(seed=2))


@pytest.mark.parametrize("method", ["atas", "fgsm-rs", "fgsm-rs-adaptive", "standard"])
def test_statistics_of_averages_are_measured_at_the_end(method, tmp_path, train_toy, toy_data, tiny_net):
    """They are the means over whole batches of training images as the method shows them; nothing else changes."""
    values = {"training.ema": (0.9, 0.5), "training.epochs": 2, "data.pad": 0, "data.flip": False}
    runs = {}
    for how in ("average", "re-estimate"):
        folder = tmp_path / how
        runs[how] = train_toy(folder, method, values | {"training.ema_batchnorm": how}, model=tiny_net()), folder
    (plain, _), (measured, folder) = runs.values()
    tensors, _ = checkpoint.load(folder / "checkpoints" / "last.safetensors")
    for name, value in measured.model.state_dict().items():
        changed = name.endswith(("running_mean", "running_var"))
        assert torch.equal(value, plain.model.state_dict()[name]) != changed, name
        assert torch.equal(value, tensors[f"ema.model.{name}"]), name
    assert measured.metrics[-1]["seconds"] > 0
    before, _ = checkpoint.load(tmp_path / "average" / "checkpoints" / "last.safetensors")
    changed = {name for name, tensor in tensors.items() if not torch.equal(tensor, before[name])}
    statistics = {f"bn{number}.running_{kind}" for number in (1, 2) for kind in ("mean", "var")}
    assert changed == {f"{average}.model.{name}" for average in ("ema", "ema2") for name in statistics}
    if method == "standard":
        model, inputs = tiny_net(), []
        model.load_state_dict(measured.model.state_dict())
        model.bn1.register_forward_pre_hook(lambda _module, given: inputs.append(given[0].mean((0, 2, 3))))
        images, order = toy_data.train.images.float() / 255, DataShard(60).order(0, 1)
        with torch.no_grad():
            for index in order.split(16)[: len(order) // 16]:
                model(images[index])
        assert len(inputs) == 3
        torch.testing.assert_close(measured.model.bn1.running_mean, torch.stack(inputs).mean(0))


@pytest.mark.parametrize("values", [{"data.loading": "streaming", "data.workers": 1}, {"method.store": "host"}])
def test_statistics_are_the_same_wherever_images_and_memory_live(values, tmp_path, train_toy):
    usual = {"training.ema": 0.9, "training.ema_batchnorm": "re-estimate", "training.epochs": 2}
    models = [
        train_toy(tmp_path / str(number), values=usual | own).model.state_dict()
        for number, own in enumerate(({}, values))
    ]
    for name, value in models[0].items():
        assert torch.equal(value, models[1][name]), name


def test_statistics_are_measured_after_a_stop_behind_the_last_step(
    tmp_path, train_toy, interrupt_after, tiny_net, assert_same_run
):
    """Also of a model that was given in eval mode, which no step has put into train mode since the resume."""
    values = {"training.ema": 0.9, "training.ema_batchnorm": "re-estimate", "training.epochs": 1}
    train_toy(tmp_path / "whole", values=values, model=tiny_net().eval())
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "parts", values=values, model=tiny_net().eval(), live=interrupt_after(4))
    train_toy(tmp_path / "parts", values=values, model=tiny_net().eval(), resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
def test_a_run_that_is_stopped_at_its_collapse_has_measured_statistics(tmp_path, train_toy):
    """Those of the healthy checkpoint that it ends with."""
    values = {"training.ema": 0.9, "training.on_collapse": "stop", "training.epochs": 3}
    models = []
    for how in ("average", "re-estimate"):
        values["training.ema_batchnorm"] = how
        run = train_toy(tmp_path / how, values=values, probe=scripted_probe(HEALTHY, COLLAPSED))
        models.append(run.model.state_dict())
    changed = {name for name in models[0] if not torch.equal(models[0][name], models[1][name])}
    assert changed == {f"bn{number}.running_{kind}" for number in (1, 2) for kind in ("mean", "var")}


def test_layers_kept_in_eval_mode_keep_their_statistics(toy_recipe, toy_data, tiny_net):
    values = {"training.ema": 0.9, "training.ema_batchnorm": "re-estimate", "training.epochs": 1}
    model = tiny_net().train()
    engine = build(toy_recipe("atas", values), toy_data, model, log=lambda text: None).engine
    engine.start_epoch(0, 0)
    model.bn1.eval()
    (average,) = engine.averages.values()
    before = {name: value.clone() for name, value in average.model.state_dict().items()}
    reestimate_batchnorm(engine)
    after = average.model.state_dict()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == ["bn2.running_mean", "bn2.running_var"]
    assert not any(module.training for module in average.model.modules())
    assert average.model.bn2.momentum == 0.1


@pytest.mark.parametrize("final", [0.0, 0.1, 1.0])
def test_the_floor_of_the_rate(final):
    """Linear from the peak to a share of it; the momentum goes back all the way."""
    schedule = ScheduleConfig(name="cyclic", peak=0.2, peak_at=0.25, final=final, peak_momentum=0.8)
    rates = learning_rate(schedule, torch.arange(9), 8)
    expected = [0.0, 0.1, *(0.2 * (final + (1 - final) * (8 - update) / 6) for update in range(2, 9))]
    assert rates.tolist() == pytest.approx(expected)
    assert momentum_at(schedule, 0.9, torch.arange(9), 8)[[0, 2, 8]].tolist() == pytest.approx([0.9, 0.8, 0.9])


def test_averaged_weights_of_a_named_model_come_back(tmp_path, toy_data, toy_recipe):
    settings = toy_recipe("fgsm", {"training.ema": 0.9, "training.epochs": 1})
    run = atas.train(settings, out=tmp_path / "run", data=toy_data)
    again = Run.load(tmp_path / "run")
    for name, tensor in again.model.state_dict().items():
        assert torch.equal(tensor, run.model.state_dict()[name])
