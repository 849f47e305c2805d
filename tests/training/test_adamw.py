"""AdamW, gradient clipping and schedules with warm-up: equal to PyTorch's, in every engine and across a resume."""

import math

import pytest
import torch
from torch import nn

from atas import recipes
from atas.errors import UsageError
from atas.recipes import OptimizerConfig, ScheduleConfig
from atas.training import checkpoint
from atas.training.build import build
from atas.training.optim import SGD, AdamW, clip_gradients, create_optimizer
from atas.training.schedule import learning_rate, update_table
from atas.training.trainer import Interrupted

ADAMW = {
    "optimizer.name": "adamw",
    "optimizer.weight_decay": 0.05,
    "optimizer.decay_norms": False,
    "optimizer.clip_norm": 0.5,
    "schedule.name": "cosine",
    "schedule.peak": 0.01,
    "schedule.warmup": 0.25,
}


def train_both(config, theirs, schedule, generator, dtype=torch.float64):
    """Weights after twenty steps of ours and of an optimiser of torch, with the same random gradients."""
    first = [torch.randn(5, 3, generator=generator).to(dtype), torch.randn(4, generator=generator).to(dtype)]
    ours, parameters = [weight.clone() for weight in first], [nn.Parameter(weight.clone()) for weight in first]
    optimizer, mine = theirs(parameters), AdamW(config, ours, ours)
    table = update_table(config, schedule, 20)
    for step in range(20):
        gradients = [torch.randn(weight.shape, generator=generator).to(dtype) for weight in first]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.param_groups[0]["lr"] = float(table[step, 0])
        optimizer.step()
        mine.step(gradients, *table[step].unbind())
    return ours, parameters


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
def test_adamw_is_that_of_torch(dtype, generator):
    config = OptimizerConfig(name="adamw", weight_decay=0.05, betas=(0.8, 0.95), eps=1e-6)
    schedule = ScheduleConfig(name="cosine", peak=0.1, warmup=0.2)

    def theirs(parameters):
        return torch.optim.AdamW(parameters, lr=1.0, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.05)

    for mine, other in zip(*train_both(config, theirs, schedule, generator, dtype), strict=True):
        torch.testing.assert_close(mine, other.detach(), rtol=1e-5 if dtype == torch.float32 else 1e-9, atol=1e-6)


def test_weights_without_a_gradient_stay():
    weights = [torch.ones(3), torch.ones(2)]
    AdamW(OptimizerConfig(name="adamw"), weights, weights).step([None, torch.ones(2)], *torch.tensor([0.1, 0.1, 0.1]))
    assert torch.equal(weights[0], torch.ones(3))
    assert not torch.equal(weights[1], torch.ones(2))


class Tokens(nn.Module):
    """Names what should not decay, as networks of timm do."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.ones(1, 4, 2))
        self.norm, self.linear = nn.LayerNorm(2), nn.Linear(2, 2)

    def no_weight_decay(self):
        return {"position"}


@pytest.mark.parametrize("name", ["sgd", "adamw"])
@pytest.mark.parametrize("decay_norms", [None, True, False])
def test_norms_biases_and_what_the_network_names_need_not_decay(name, decay_norms):
    model = nn.Sequential(Tokens())
    config = OptimizerConfig(name=name, weight_decay=0.5, momentum=0.0, decay_norms=decay_norms)
    optimizer = create_optimizer(config, model, model)
    zeros = [torch.zeros_like(weight) for weight in optimizer.weights]
    before = {key: value.detach().clone() for key, value in model.named_parameters()}
    optimizer.step(zeros, *(torch.tensor(value) for value in ((0.1, 0.0) if name == "sgd" else (0.1, 0.1, 0.1))))
    decayed = {key for key, value in model.named_parameters() if not torch.equal(value, before[key])}
    everything = {key for key, value in before.items() if float(value.abs().sum())}
    assert decayed == ({"0.linear.weight"} if decay_norms is False else everything)
    torch.testing.assert_close(model[0].linear.weight, before["0.linear.weight"] * 0.95)


@pytest.mark.parametrize("limit", [0.1, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_clipping_is_that_of_torch(limit, dtype, generator):
    gradients = [torch.randn(5, 3, generator=generator).to(dtype), torch.randn(4, generator=generator).to(dtype)]
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_(parameters, limit)
    clipped = clip_gradients([gradients[0], None, gradients[1]], limit)
    assert clipped[1] is None
    for mine, parameter in zip((clipped[0], clipped[2]), parameters, strict=True):
        torch.testing.assert_close(mine, parameter.grad)
        assert mine.dtype == dtype


def test_low_precision_gradients_are_clipped_in_float32():
    """Their squares would lose or exceed the range."""
    (clipped,) = clip_gradients([torch.full((100_000,), 0.01, dtype=torch.bfloat16)], 1.0)
    assert float(clipped.norm()) == pytest.approx(1.0, rel=1e-3)
    assert clip_gradients([None], 1.0) == [None]


@pytest.mark.parametrize("final", [None, 0.1])
@pytest.mark.parametrize("warmup", [None, 0.0, 0.2])
def test_the_cosine(final, warmup):
    schedule = ScheduleConfig(name="cosine", peak=0.5, warmup=warmup, final=final)
    rates, risen = learning_rate(schedule, torch.arange(11), 10).tolist(), round(10 * (warmup or 0))
    for update, rate in enumerate(rates):
        if update < risen:
            expected = 0.5 * (update + 1) / risen
        else:
            height = (1 + math.cos(math.pi * (update - risen) / (10 - risen))) / 2
            expected = 0.5 * ((final or 0) + (1 - (final or 0)) * height)
        assert rate == pytest.approx(expected, abs=1e-12)


def test_a_piecewise_rate_warms_up():
    schedule = ScheduleConfig(peak=0.1, milestones=(0.5,), warmup=0.4)
    rates = learning_rate(schedule, torch.arange(10), 10).tolist()
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.01, 0.01, 0.01, 0.01, 0.01])
    short = ScheduleConfig(peak=0.1, milestones=(0.9,), warmup=0.01)  # shorter than one update
    assert learning_rate(short, torch.arange(2), 10).tolist() == pytest.approx([0.1, 0.1])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["atas", "free", "yopo"])
def test_a_resume_gives_the_same_bits(method, tmp_path, train_toy, interrupt_after, assert_same_run):
    values = ADAMW | {"training.ema": 0.9}
    train_toy(tmp_path / "whole", method, values)
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "parts", method, values, live=interrupt_after(5))
    train_toy(tmp_path / "parts", method, values, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    tensors, _ = checkpoint.load(tmp_path / "whole" / "checkpoints" / "last.safetensors")
    assert {name.partition(".")[0] for name in tensors} >= {"momentum", "squares"}


@pytest.mark.parametrize("form", ["ascent", "attack", "momentum"])
def test_weights_are_perturbed(form, toy_recipe, toy_data, tiny_net):
    values = ADAMW | {"optimizer.perturb": form, "engine.precision": "bf16"}
    engine = build(toy_recipe("atas", values), toy_data, tiny_net(), log=lambda text: None).engine
    engine.start_epoch(0, 0)
    for _ in range(len(engine.loader)):
        engine.step()
    assert all(bool(tensor.isfinite().all()) for tensor in engine.state_tensors().values())
    for weight, copied in zip(engine.model.parameters(), engine.compute_model.parameters(), strict=True):
        assert torch.equal(weight.to(copied.dtype), copied)


def test_sgd_stays_as_it_was():
    """Without the new keys nothing is clipped, warmed up or excluded from the decay, and nothing more is saved."""
    model = nn.Linear(3, 2)
    optimizer = create_optimizer(OptimizerConfig(), model, model)
    assert type(optimizer) is SGD
    assert all(optimizer.decays)
    assert list(optimizer.state()) == ["momentum"]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"optimizer.name": "adam"}, "unknown value of optimizer.name 'adam'; did you mean 'adamw'"),
        ({"optimizer.betas": (0.9, 0.99)}, "optimizer.betas has no effect without optimizer.name = adamw"),
        ({"optimizer.name": "adamw", "optimizer.betas": (0.9, 1.0)}, r"optimizer.betas must be in \[0, 1\)"),
        ({"optimizer.name": "adamw", "optimizer.nesterov": True}, "optimizer.nesterov needs optimizer.name = sgd"),
        ({"optimizer.clip_norm": 0}, "optimizer.clip_norm must be above zero"),
        ({"schedule.warmup": 1}, "schedule.warmup is a share of the training"),
    ],
)
def test_settings_that_contradict_each_other(values, sentence, toy_recipe):
    with pytest.raises(UsageError, match=sentence):
        toy_recipe("atas", values)


def test_another_optimiser_leaves_the_momentum_of_sgd_behind(toy_recipe):
    nesterov = toy_recipe("atas", {"optimizer.nesterov": True, "optimizer.momentum": 0.8})
    assert not nesterov.with_values({"optimizer.name": "adamw"}).optimizer.nesterov
    assert nesterov.with_values({"optimizer.name": "sgd"}).optimizer.nesterov


def test_keys_that_came_later_leave_fingerprints_alone(toy_recipe):
    recipe = toy_recipe()
    assert recipes.recipe_fingerprint(recipe) == recipes.recipe_fingerprint(
        recipe.with_values({"optimizer.name": "sgd", "schedule.warmup": None, "optimizer.clip_norm": None})
    )
    fingerprints = {recipes.recipe_fingerprint(recipe.with_values({key: value})) for key, value in ADAMW.items()}
    assert len(fingerprints | {recipes.recipe_fingerprint(recipe)}) == 1 + len(ADAMW)
