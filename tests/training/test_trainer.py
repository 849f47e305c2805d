"""The trainer: what is trained on, in which order, with which rate, and what is left alone."""

import dataclasses
import json
import random
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.fake_device import FakeTensor, work_elsewhere
from helpers.run_files import metric_rows
from torch import nn
from torch.utils.data import TensorDataset

import atas
from atas.distributed.world import select_device
from atas.errors import DataError, UsageError
from atas.methods import Standard
from atas.training import Run, TrainingProgress, checkpoint, examples
from atas.training import build as building
from atas.training.build import build
from atas.training.engine import Engine
from atas.training.model_checks import check_model

KEYS = {"epoch", "updates", "rate", "loss", "train_accuracy", "clean", "fgsm", "pgd10", "pgd10_loss", "collapsed"}
KEYS |= {"seconds", "examples_per_second", "probe_gradient_norms"}
ADAPTIVE = {"step_size", "gradient_norm", "step_sizes", "gradient_norms"}
ADAPTIVE |= {"step_size_by_tenth", "gradient_norm_by_tenth"}


@pytest.fixture
def fed(monkeypatch):
    """What standard training is fed, batch by batch: images, labels, indices, and the model's mode."""
    batches = []
    training_step = Standard.training_step

    def spy(self, model, update, batch):
        if isinstance(update, Engine):  # not the trial before the training
            batches.append((batch.x.clone(), batch.y.clone(), batch.index.clone(), model.training))
        return training_step(self, model, update, batch)

    monkeypatch.setattr(Standard, "training_step", spy)
    return batches


def weights_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_equal_states(one, other):
    assert list(one) == list(other)
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


# What is fed


def test_every_epoch_shows_every_example_once_and_keeps_the_short_last_batch(tmp_path, train_toy, fed, toy_data):
    train_toy(tmp_path / "run", "standard", {"training.epochs": 2, "data.pad": 0, "data.flip": False})
    assert [len(x) for x, *_ in fed] == [16, 16, 16, 12] * 2
    for epoch in (fed[:4], fed[4:]):
        index = torch.cat([batch[2] for batch in epoch])
        assert sorted(index.tolist()) == list(range(60))
        x, y = torch.cat([batch[0] for batch in epoch]), torch.cat([batch[1] for batch in epoch])
        torch.testing.assert_close(x, toy_data.train.images[index].float() / 255, rtol=0, atol=0)
        assert torch.equal(y, toy_data.train.labels[index])
    assert all(training for *_, training in fed)
    assert not torch.equal(fed[0][2], fed[4][2])


def test_a_batch_larger_than_the_data(tmp_path, train_toy, fed):
    run = train_toy(tmp_path / "run", "standard", {"training.epochs": 2, "training.batch_size": 500})
    assert [len(x) for x, *_ in fed] == [60, 60]
    assert [row["updates"] for row in run.metrics] == [1, 2]


@pytest.mark.parametrize("method", ["standard", "atas", "free", "yopo"])
def test_batches_of_one(method, tmp_path, train_toy, toy_data):
    """The last batch of 60 in batches of 59 has a single image."""
    run = train_toy(tmp_path / "run", method, {"training.epochs": 1, "training.batch_size": 59})
    assert run.metrics[0]["loss"] > 0


def shown(fed):
    """For every example how it was shown, by index."""
    return {int(i): image for x, _, index, _ in fed for i, image in zip(index, x, strict=True)}


def test_order_and_views_depend_on_seed_and_epoch_alone(tmp_path, train_toy, fed, interrupt_after):
    values = {"training.epochs": 2}
    train_toy(tmp_path / "a", "standard", values)
    first, second = fed[:4], fed[4:8]
    fed.clear()
    torch.manual_seed(99)
    train_toy(tmp_path / "b", "standard", values | {"schedule.peak": 0.01, "training.probe": 5, "method.eps": 0.2})
    for one, other in zip([*first, *second], fed, strict=True):
        assert torch.equal(one[2], other[2])
        assert torch.equal(one[0], other[0])
    fed.clear()
    train_toy(tmp_path / "c", "standard", values | {"training.batch_size": 7})
    again = shown(fed[:9])
    for i, image in shown(first).items():
        assert torch.equal(image, again[i]), "a view must not depend on the batch that it is in"
    fed.clear()
    train_toy(tmp_path / "d", "standard", values | {"training.seed": 1})
    assert not torch.equal(torch.cat([b[2] for b in fed[:4]]), torch.cat([b[2] for b in first]))
    other = shown(fed[:4])
    assert any(not torch.equal(image, other[i]) for i, image in shown(first).items())
    later = shown(second)
    assert any(not torch.equal(image, later[i]) for i, image in shown(first).items())


# Bits


def test_equal_seeds_give_equal_bits(tmp_path, train_toy, assert_same_run):
    train_toy(tmp_path / "a")
    torch.manual_seed(1234)
    train_toy(tmp_path / "b")
    assert_same_run(tmp_path / "a", tmp_path / "b")


def test_another_seed_gives_other_weights(tmp_path, train_toy, toy_data, toy_recipe):
    states = [weights_of(train_toy(tmp_path / str(seed), values={"training.seed": seed}).model) for seed in (0, 1)]
    assert not torch.equal(states[0]["fc.weight"], states[1]["fc.weight"])
    # A model that the recipe names begins from the seed too.
    made = [
        atas.train(toy_recipe("standard", {"training.epochs": 1}), out=tmp_path / f"s{n}", seed=seed, data=toy_data)
        for n, seed in enumerate((3, 3, 4))
    ]
    assert_equal_states(weights_of(made[0].model), weights_of(made[1].model))
    assert not torch.equal(made[0].model.fc.weight, made[2].model.fc.weight)
    assert made[2].recipe.training.seed == 4


def test_global_random_states_are_left_alone(tmp_path, toy_data, toy_recipe, train_toy, interrupt_after):
    def states():
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()

    torch.manual_seed(5)
    before = states()
    atas.train(toy_recipe(), out=tmp_path / "a", data=toy_data)
    Run.load(tmp_path / "a")
    assert states() == before


def test_global_switches_are_left_alone(tmp_path, train_toy):
    before = torch.is_grad_enabled(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    train_toy(tmp_path / "run", values={"training.epochs": 1})
    assert (torch.is_grad_enabled(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("schedule", ["piecewise", "cyclic", "CyclicLR"])
def test_standard_training_is_a_plain_loop(nesterov, schedule, tmp_path, train_toy, fed, tiny_net):
    """The same weights as torch.optim.SGD with the rate set before every update; also with the momentum that PyTorch's
    CyclicLR lets go against the rate by default."""
    values = {"schedule.name": schedule, "optimizer.nesterov": nesterov, "optimizer.weight_decay": 0.01}
    if schedule == "CyclicLR":
        values |= {"schedule.name": "cyclic", "schedule.peak_momentum": 0.8}
    run = train_toy(tmp_path / "run", "standard", values)
    model = tiny_net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1, momentum=0.9, weight_decay=0.01, nesterov=nesterov)
    cycle = torch.optim.lr_scheduler.CyclicLR(optimizer, 0, 0.05, 6, 6) if schedule == "CyclicLR" else None
    losses = []
    for update, (x, y, _, _) in enumerate(list(fed)):
        if schedule == "piecewise":
            rate = 0.05 * 0.1 ** ((update >= 6) + (update >= 10))  # 12 updates, drops at one half and at 80%
        else:
            rate = 0.05 * min(update / 6, (12 - update) / 6)
        if cycle is None:
            optimizer.param_groups[0]["lr"] = rate
        loss = F.cross_entropy(model(x.double()), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if cycle is not None:
            assert optimizer.param_groups[0]["lr"] == pytest.approx(rate)
            cycle.step()
        losses.append((loss.item() * len(x), len(x)))
    for name, tensor in run.model.state_dict().items():
        torch.testing.assert_close(tensor.double(), model.state_dict()[name].double(), rtol=1e-4, atol=1e-5)
    for epoch, row in enumerate(run.metrics):
        part = losses[4 * epoch : 4 * epoch + 4]
        assert row["loss"] == pytest.approx(sum(loss for loss, _ in part) / 60, rel=1e-4)


def test_free_takes_its_rate_by_update(tmp_path, train_toy, monkeypatch):
    """With 8 replays, an epoch of 4 batches is 32 updates, and the peak of the triangle lies at half of them all."""
    values = {"schedule.name": "cyclic", "training.epochs": 2, "method.replays": 8}
    run = train_toy(tmp_path / "run", "free", values)
    assert [row["updates"] for row in run.metrics] == [32, 64]
    assert [row["rate"] for row in run.metrics] == pytest.approx([0.05, 0.0])
    _, state = checkpoint.load(tmp_path / "run" / "checkpoints" / "last.safetensors")
    assert state["updates"] == 64


# Metrics and files


def test_rows_have_the_documented_keys(tmp_path, train_toy):
    run = train_toy(tmp_path / "atas")
    assert [row["epoch"] for row in run.metrics] == [0, 1, 2]
    assert [row["updates"] for row in run.metrics] == [4, 8, 12]
    for row in run.metrics:
        assert set(row) == KEYS | ADAPTIVE
        assert 0 <= row["pgd10"] <= row["clean"] <= 1
        assert 0 <= row["train_accuracy"] <= 1
        assert row["seconds"] > 0
        assert row["examples_per_second"] > 0
        assert row["collapsed"] is False
    assert run.metrics[0]["step_size"] == pytest.approx(0.1, rel=1e-5)  # the warm-up's constant step eps
    assert 0.02 <= run.metrics[2]["step_size"] <= 0.15
    assert run.metrics[0]["gradient_norm"] == 0
    assert run.metrics[2]["gradient_norm"] > 0
    seconds = [row["seconds"] for row in run.metrics]
    assert seconds == sorted(seconds)
    assert metric_rows(tmp_path / "atas") == run.metrics
    run = train_toy(tmp_path / "pgd", "pgd", {"training.epochs": 1})
    assert set(run.metrics[0]) == KEYS


def test_the_folder_of_a_run(tmp_path, train_toy):
    run = train_toy(tmp_path / "run")
    assert run.folder == tmp_path / "run"
    names = {path.name for path in run.folder.iterdir()}
    assert names >= {"recipe.toml", "environment.json", "metrics.jsonl", "checkpoints", "model.safetensors"}
    assert not [path for path in run.folder.rglob("*") if path.name.endswith(".tmp")]
    found = json.loads((run.folder / "environment.json").read_text())
    assert found["torch"] == torch.__version__
    assert found["atas"] == atas.__version__
    assert {"python", "device"} <= set(found)
    text = (run.folder / "recipe.toml").read_text()
    assert text.startswith(f"# atas train {run.folder / 'recipe.toml'}\n")
    assert atas.recipes.load(run.folder / "recipe.toml") == run.recipe
    assert not run.model.training


def test_the_default_folder_is_named_by_the_recipe(tmp_path, monkeypatch, toy_recipe, toy_data, tiny_net):
    monkeypatch.chdir(tmp_path)
    run = atas.train(toy_recipe("standard", {"training.epochs": 1}), data=toy_data, model=tiny_net())
    assert run.folder.resolve() == tmp_path / "runs" / "toy"


@pytest.mark.parametrize("name", ["", ".", "..", "../../evil", "/evil", "a/b", "a\\b", "a\0b"])
def test_a_recipe_s_name_that_leads_out_of_the_runs(name, tmp_path, monkeypatch, toy_recipe):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UsageError, match="cannot be the name of a folder in runs; change it or pass --out"):
        atas.train(dataclasses.replace(toy_recipe(), name=name))
    assert [path.name for path in tmp_path.rglob("*")] == ["here"]


def test_learning_happens(tmp_path, train_toy):
    run = train_toy(tmp_path / "run", "fgsm", {"training.epochs": 12, "method.eps": 0.02, "schedule.peak": 0.2})
    assert run.metrics[-1]["clean"] > 0.9
    assert run.metrics[-1]["loss"] < run.metrics[0]["loss"]


def test_without_tensorboard_all_else_is_the_same(tmp_path, train_toy, monkeypatch, assert_same_run):
    train_toy(tmp_path / "with")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    train_toy(tmp_path / "without")
    assert not (tmp_path / "without" / "tensorboard").exists()
    assert_same_run(tmp_path / "with", tmp_path / "without")


# Models and data of one's own


def test_own_model_and_data_objects(tmp_path, toy_data, tiny_net, train_toy):
    net = tiny_net(seed=3)
    run = train_toy(tmp_path / "run", model=net)
    assert run.model is net
    assert repr(run) == f"Run(folder={run.folder!r})"
    assert (run.recipe.model.name, run.recipe.data.name) == ("given:TinyNet", "given:toy")
    loaded = Run.load(tmp_path / "run", model=tiny_net(seed=8))
    assert_equal_states(weights_of(loaded.model), weights_of(net))
    assert loaded.metrics == run.metrics
    assert not loaded.model.training
    with pytest.raises(UsageError, match=r"was passed in Python; pass it to atas\.Run\.load\(folder, model=\.\.\.\)"):
        Run.load(tmp_path / "run")
    with pytest.raises(DataError, match="do not fit this model"):
        Run.load(tmp_path / "run", model=tiny_net(width=5))
    with pytest.raises(UsageError, match=r"was given in Python \('toy'\); pass it again"):
        atas.train(tmp_path / "run" / "recipe.toml", out=tmp_path / "again", model=tiny_net())
    with pytest.raises(UsageError, match=r"given in Python \(given:TinyNet\); pass it to atas\.train\(model=\.\.\.\)"):
        atas.train(tmp_path / "run" / "recipe.toml", out=tmp_path / "again", data=toy_data)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"model": 5}, r"the model must be a torch\.nn\.Module; got int"),
        ({"data": TensorDataset(torch.zeros(4))}, r"data must be a Dataset, a pair .*; got a TensorDataset"),
    ],
    ids=["model", "data"],
)
def test_objects_of_another_kind(given, match, tmp_path, train_toy):
    with pytest.raises(UsageError, match=match):
        train_toy(tmp_path / "run", **given)


def test_a_named_model_on_own_data(tmp_path, toy_data, toy_recipe):
    run = atas.train(toy_recipe("fgsm-rs", {"training.epochs": 1}), out=tmp_path / "run", data=toy_data)
    assert run.model.fc.out_features == 3
    again = Run.load(tmp_path / "run")
    assert_equal_states(weights_of(again.model), weights_of(run.model))


def test_own_factory_by_name(tmp_path, monkeypatch, toy_data, toy_recipe):
    (tmp_path / "my_factory_module.py").write_text(
        "from torch import nn\n\n\n"
        "def build(num_classes, channels):\n"
        "    return nn.Sequential(nn.Conv2d(channels, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, num_classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    settings = toy_recipe("atas", {"model.name": "my_factory_module:build", "training.epochs": 1})
    run = atas.train(settings, out=tmp_path / "run", data=toy_data)
    assert run.recipe.model.name == "my_factory_module:build"
    again = Run.load(tmp_path / "run", trust=True)
    assert_equal_states(weights_of(again.model), weights_of(run.model))
    sys.modules.pop("my_factory_module")


def test_a_model_with_tied_weights(tmp_path, train_toy, interrupt_after, assert_same_run, tied_net):
    from atas.training.trainer import Interrupted

    run = train_toy(tmp_path / "whole", model=tied_net())
    assert torch.equal(run.model.inward.weight, run.model.outward.weight)
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "parts", model=tied_net(), live=interrupt_after(6))
    train_toy(tmp_path / "parts", model=tied_net(), resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_batch_norm_that_its_owner_froze_stays_frozen(tmp_path, train_toy, tiny_net):
    net = tiny_net().train()
    net.bn1.eval()
    net.bn1.requires_grad_(False)
    net.conv1.requires_grad_(False)
    before = weights_of(net)
    train_toy(tmp_path / "run", "fgsm-rs", model=net)
    after = weights_of(net)
    for name in ("conv1.weight", "conv1.bias", "bn1.weight", "bn1.bias"):
        assert torch.equal(after[name], before[name]), name
    assert not torch.equal(after["bn2.running_mean"], before["bn2.running_mean"])
    assert not torch.equal(after["fc.weight"], before["fc.weight"])
    for name in ("bn1.running_mean", "bn1.running_var", "bn1.num_batches_tracked"):
        assert torch.equal(after[name], before[name]), name


def test_a_batch_of_one_image_that_the_model_cannot_normalise(tmp_path, train_toy, tiny_net):
    """It would come at the end of an epoch: 60 images in batches of 59."""
    flat = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3), torch.nn.BatchNorm1d(3))
    with pytest.raises(UsageError, match=r"cannot be trained on a single image.*; use another training.batch_size"):
        train_toy(tmp_path / "flat", values={"training.batch_size": 59}, model=flat)
    assert flat[2].num_batches_tracked == 0
    train_toy(tmp_path / "flat", values={"training.batch_size": 58, "training.epochs": 1}, model=flat)
    model = tiny_net()
    train_toy(tmp_path / "net", values={"training.batch_size": 59, "training.epochs": 1}, model=model)
    assert model.bn1.num_batches_tracked == 2


def test_a_single_class_is_named(tmp_path):
    pixels = np.zeros((4, 1, 8, 8), np.uint8)
    data = atas.data.from_arrays("one", pixels, [0] * 4, pixels, [0] * 4, classes=["cat"])
    with pytest.raises(DataError, match="the data has a single class, cat; a classifier needs two or more"):
        atas.train("digits-small-cnn-atas", out=tmp_path / "run", data=data)


def test_a_model_given_in_eval_mode_is_trained(tmp_path, train_toy, tiny_net):
    net = tiny_net().eval()
    before = weights_of(net)
    run = train_toy(tmp_path / "run", "standard", model=net)
    assert not torch.equal(run.model.bn1.running_mean, before["bn1.running_mean"])
    assert not run.model.training


def test_which_weights_learn_is_left_as_it_was(tmp_path, train_toy, tiny_net):
    net = tiny_net()
    net.conv1.weight.requires_grad_(False)
    train_toy(tmp_path / "run", model=net)
    assert [name for name, weight in net.named_parameters() if not weight.requires_grad] == ["conv1.weight"]


def test_a_layer_that_takes_no_part(tmp_path, train_toy, interrupt_after, assert_same_run):
    from atas.training.trainer import Interrupted

    class Spare(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.used, self.spare = nn.Linear(64, 3), nn.Linear(64, 3)

        def forward(self, x):
            return self.used(x.flatten(1))

    train_toy(tmp_path / "whole", model=Spare())
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "parts", model=Spare(), live=interrupt_after(6))
    train_toy(tmp_path / "parts", model=Spare(), resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


# Precision


def test_bf16_trains_resumes_and_leaves_float32_weights(tmp_path, train_toy, interrupt_after, assert_same_run):
    from atas.training.trainer import Interrupted

    values = {"engine.precision": "bf16"}
    run = train_toy(tmp_path / "whole", values=values)
    assert {tensor.dtype for tensor in run.model.state_dict().values()} == {torch.float32, torch.int64}
    plain = train_toy(tmp_path / "plain")
    assert not torch.equal(run.model.fc.weight, plain.model.fc.weight)
    torch.testing.assert_close(run.model.fc.weight, plain.model.fc.weight, rtol=0.1, atol=0.05)
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "parts", values=values, live=interrupt_after(6))
    train_toy(tmp_path / "parts", values=values, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


# Trouble


def test_a_loss_that_diverges_is_an_error_with_a_remedy(tmp_path, train_toy):
    with pytest.raises(DataError, match=r"in epoch \d+: training has diverged; .* smaller schedule\.peak"):
        train_toy(tmp_path / "run", "fgsm-rs", {"schedule.peak": 1e30})
    with pytest.raises(DataError, match=r"it diverged in epoch \d+; start again with --overwrite and a smaller sched"):
        Run.load(tmp_path / "run", model=nn.Flatten())
    values = {"consistency.weight": 1e30, "consistency.distance": "logits"}
    with pytest.raises(DataError, match=r"--overwrite and consistency\.through = both or consistency\.distance = js"):
        train_toy(tmp_path / "logits", values=values)
    with pytest.raises(DataError, match=r"a smaller consistency\.weight or schedule\.peak"):
        train_toy(tmp_path / "both", values=values | {"method.attack_mode": "train"})
    with pytest.raises(DataError, match=r"a smaller optimizer\.weight_decay or schedule\.peak"):
        train_toy(tmp_path / "decay", values={"optimizer.weight_decay": 1e30})


@pytest.mark.parametrize(("device", "match"), [("tpu9", "no device 'tpu9'"), ("cuda", "no CUDA device")])
def test_a_device_that_is_not_there(device, match, tmp_path, train_toy):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(UsageError, match=match):
        train_toy(tmp_path / "run", values={"engine.device": device})


def test_keys_of_epochs_after_the_last_are_named(toy_recipe, toy_data, tiny_net):
    late = {"targets.share": 0.5, "targets.from_epoch": 3, "optimizer.perturb": "momentum", "optimizer.perturb_from": 7}
    said = []
    build(toy_recipe("atas", late), toy_data, tiny_net(), log=said.append)
    assert [text for text in said if "no effect" in text] == [
        "targets.from_epoch = 3 has no effect in 3 epochs, which are counted from 0",
        "optimizer.perturb_from = 7 has no effect in 3 epochs, which are counted from 0",
    ]
    said.clear()
    build(toy_recipe("atas", late | {"training.epochs": 8}), toy_data, tiny_net(), log=said.append)
    assert not [text for text in said if "no effect" in text]


def test_a_device_with_a_number_becomes_the_current_one(monkeypatch):
    """On which streams, graphs and kernels are made."""
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert select_device("cuda:1") == torch.device("cuda", 1)
    assert select_device("auto") == select_device("cuda") == torch.device("cuda")
    assert current == [torch.device("cuda", 1)]
    with pytest.raises(UsageError, match=r"no device 'cuda:2'; this machine has cuda:0 to cuda:1"):
        select_device("cuda:2")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_an_engine_that_needs_a_device(tmp_path, train_toy):
    with pytest.raises(UsageError, match=r"the captured engine needs a CUDA device; set engine\.kind=eager or auto"):
        train_toy(tmp_path / "run", values={"engine.kind": "captured"})
    assert not (tmp_path / "run").exists()


def test_too_large_a_held_out_slice(tmp_path, train_toy):
    with pytest.raises(DataError, match=r"set a smaller training\.probe"):
        train_toy(tmp_path / "run", values={"training.probe": 60, "training.on_collapse": "stop"})
    train_toy(tmp_path / "run", values={"training.probe": 1000, "training.epochs": 1})


def test_more_classes_in_the_data_than_in_the_model(tmp_path, train_toy, tiny_net):
    with pytest.raises(UsageError, match="the model has 2 outputs for 3 classes"):
        train_toy(tmp_path / "run", model=tiny_net(num_classes=2))


@pytest.mark.parametrize(
    ("method", "values"), [("atas-plus", {}), ("atas", {"targets.share": 0.4}), ("atas", {"targets.smoothing": 0.1})]
)
def test_targets_of_a_model_with_more_outputs_than_there_are_classes(tmp_path, train_toy, tiny_net, method, values):
    run = train_toy(tmp_path / "run", method, {"training.epochs": 1} | values, model=tiny_net(num_classes=5))
    assert len(run.metrics) == 1


class Wrong(nn.Module):
    """A network of which one thing is wrong."""

    def __init__(self, forward):
        super().__init__()
        self.norm, self.linear, self._forward = nn.BatchNorm1d(64), nn.Linear(64, 3), forward

    def forward(self, x):
        return self._forward(self, x.flatten(1))


@pytest.mark.parametrize(
    ("forward", "match"),
    [
        (lambda net, x: net.linear(x).detach(), "no gradient of the loss reaches the images through the model; look"),
        (lambda net, x: net.linear(x.detach()), "no gradient of the loss reaches the images"),
        (lambda net, x: x[:, :3], "no gradient of the loss reaches the weights"),
        (lambda net, x: net.linear(x) / 0, "outputs are NaN or infinite before any training"),
        (lambda net, x: net.linear(x).log() * 0, "outputs are NaN or infinite before any training"),
        (lambda net, x: (net.linear(x), x) if net.training else net.linear(x), "tensor of logits .*; got tuple"),
        (lambda net, x: net.linear(x), r"its weights are torch\.float64: pass model\.float\(\)"),
    ],
    ids=["detached", "images detached", "weights unused", "infinite", "NaN", "tuple in training", "double"],
)
def test_a_model_that_cannot_learn_is_refused_before_anything_is_given_up(forward, match, tmp_path, train_toy):
    model = Wrong(forward)
    if "float64" in match:
        model.double()
    train_toy(tmp_path / "run", values={"training.epochs": 1})
    kept = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match=match):
        train_toy(tmp_path / "run", model=model, overwrite=True)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == kept


def test_trying_a_model_leaves_no_trace(toy_data, tiny_net):
    model = nn.Sequential(tiny_net(), nn.Dropout()).train()
    model[0].bn1.eval()
    before, state = weights_of(model), torch.get_rng_state()
    check_model(model, toy_data)
    assert_equal_states(before, weights_of(model))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (model.training, model[0].bn1.training, model[0].bn2.training) == (True, False, True)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_model_is_taken(toy_data, tiny_net):
    model = torch.jit.script(tiny_net())
    before = weights_of(model)
    check_model(model, toy_data)
    assert_equal_states(before, weights_of(model))
    assert model.training


def test_a_folder_that_holds_something_else(tmp_path, train_toy):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("it was a dark and stormy night")
    with pytest.raises(UsageError, match="not empty and not the folder of a run"):
        train_toy(tmp_path / "thesis")
    assert [path.name for path in (tmp_path / "thesis").iterdir()] == ["chapter1.txt"]
    (tmp_path / "empty").mkdir()
    train_toy(tmp_path / "empty", values={"training.epochs": 1})


def test_a_folder_that_holds_a_run(tmp_path, train_toy, assert_same_run):
    train_toy(tmp_path / "run", values={"training.epochs": 1})
    kept = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match=r"a run in .* already; continue it with --resume, start again with --overw"):
        train_toy(tmp_path / "run")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == kept
    (tmp_path / "run" / "evaluation.json").write_text("{}")
    (tmp_path / "run" / "report.html").write_text("<p>")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    train_toy(tmp_path / "run", overwrite=True)
    assert not (tmp_path / "run" / "evaluation.json").exists(), "the result of other weights"
    assert not (tmp_path / "run" / "report.html").exists()
    assert (tmp_path / "run" / "notes.txt").exists()
    train_toy(tmp_path / "other")
    assert_same_run(tmp_path / "run", tmp_path / "other")


@pytest.mark.parametrize("mistake", ["data", "model", "setting", "probe", "device"])
def test_a_mistake_with_overwrite_costs_nothing(mistake, tmp_path, train_toy, toy_recipe, toy_data, tiny_net):
    """The old run goes only when the new one is known to be able to begin."""
    train_toy(tmp_path / "run", values={"training.epochs": 1})
    kept = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    given = {"data": toy_data, "model": tiny_net()}
    if mistake == "data":
        given.pop("data")
        values = {"data.name": "cifar10", "data.root": str(tmp_path / "none")}
    elif mistake == "model":
        given.pop("model")
        values = {"model.name": "smal-cnn"}
    else:
        values = {
            "setting": {"method.c": -1},
            "probe": {"training.on_collapse": "stop", "training.probe": 60},
            "device": {"engine.device": "tpu9"},
        }[mistake]
    with pytest.raises(atas.AtasError):
        atas.train(toy_recipe("atas", values), out=tmp_path / "run", overwrite=True, **given)
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == kept


def test_one_mean_for_all_channels_is_read_back(tmp_path):
    """A recipe writes a single number as a list of one; the weights file must be loadable without the recipe."""
    images = torch.randint(0, 256, (40, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    given = atas.data.from_arrays("colours", images, torch.arange(40) % 4, images, torch.arange(40) % 4)
    values = {"model.mean": [0.5], "model.std": [0.25], "training.epochs": 1, "training.probe": 8}
    values |= {"training.batch_size": 20, "engine.device": "cpu"}
    run = atas.train(
        "digits-small-cnn-atas", out=tmp_path / "run", values=values, data=given, live=TrainingProgress(quiet=True)
    )
    again = Run.load(tmp_path / "run")
    x = images.float() / 255
    assert torch.equal(again.model(x), run.model(x))


# Models that are a little different


class SilentTrain(nn.Module):
    """A network whose `train` returns nothing: its BatchNorm is frozen."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def train(self, mode=True):
        super().train(mode)
        self.net.bn1.eval()

    def forward(self, x):
        return self.net(x)


@pytest.mark.parametrize("ema", [None, 0.9])
def test_a_model_whose_train_returns_nothing(ema, tmp_path, train_toy, tiny_net, toy_data):
    values = {"training.epochs": 1} | ({} if ema is None else {"training.ema": ema})
    run = train_toy(tmp_path / "run", values=values, model=SilentTrain(tiny_net()))
    assert not run.model.training
    loaded = Run.load(run.folder, model=SilentTrain(tiny_net(1))).model
    opened = atas.load(run.folder / "model.safetensors", model=SilentTrain(tiny_net(2)))
    x = toy_data.test.images.float() / 255
    assert torch.equal(run.model(x), loaded(x))
    assert torch.equal(run.model(x), opened(x))
    from atas import export

    again = Run(run.folder, run.recipe, loaded, run.metrics)
    exported = export.write(again, "safetensors", tmp_path / "export")
    assert (tmp_path / "export" / "model.safetensors") in exported.files


def test_a_state_that_cannot_be_saved_is_refused_before_anything_begins(tmp_path, train_toy, tiny_net):
    model = tiny_net()
    model.register_buffer("graph", torch.eye(3).to_sparse())
    with pytest.raises(UsageError, match=r"cannot be saved.*'graph' .* is a sparse coo tensor"):
        train_toy(tmp_path / "run", model=model)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_model_with_averaged_weights_can_be_trained_further(tmp_path, train_toy, tiny_net):
    """What was kept from training stays so."""
    net = tiny_net()
    net.conv1.weight.requires_grad_(False)
    run = train_toy(tmp_path / "first", values={"training.ema": 0.9, "training.epochs": 1}, model=net)
    assert [name for name, weight in run.model.named_parameters() if not weight.requires_grad] == ["conv1.weight"]
    train_toy(tmp_path / "second", values={"training.epochs": 1}, model=run.model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*meta")
@pytest.mark.parametrize(
    "values",
    [
        {"targets.teacher_share": (0.7, 0.95), "training.ema": [0.9, 0.99]},
        {"optimizer.name": "adamw", "optimizer.clip_norm": 0.1, "training.on_collapse": "rollback"},
    ],
    ids=str,
)
def test_a_run_comes_to_the_same_on_another_device(values, monkeypatch, tmp_path, train_toy):
    """On a fake one, which refuses tensors of two devices in one operation."""
    expected = train_toy(tmp_path / "here", values={"training.epochs": 2, **values}).model.state_dict()
    with work_elsewhere(monkeypatch, building, examples):
        found = train_toy(tmp_path / "there", values={"training.epochs": 2, **values}).model.state_dict()
        for name, tensor in found.items():
            assert isinstance(tensor, FakeTensor)
            torch.testing.assert_close(tensor.cpu(), expected[name], msg=name)
