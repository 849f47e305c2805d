"""The recipes that come with the package: every CIFAR row of the paper, with the settings of its method."""

import itertools
import tomllib
from importlib import resources
from operator import attrgetter

import pytest
import torch

from atas import methods, recipes
from atas.training.monitor_budget import resolve_probe
from atas.training.schedule import learning_rate

BUDGETS = {"cifar10": (8, 12, 16), "cifar100": (4, 8, 12)}
NETWORKS = ("preact-resnet18", "wrn-28-10")
PIECEWISE = {"schedule": "piecewise", "peak": 0.1, "milestones": (24 / 30, 28 / 30), "epochs": 30, "batch_size": 128}
CYCLIC = {"schedule": "cyclic", "peak_at": 0.5, "epochs": 30, "batch_size": 128}

# Epochs, schedule, peak rate, batch, and what the attack does at a budget of eps; the paper's settings.
PAPER = {
    "pgd": (PIECEWISE, lambda eps: {"steps": 10, "step_size": eps / 4}),
    "free": (CYCLIC | {"epochs": 10, "peak": 0.04}, lambda eps: {"updates_per_step": 8, "step_size": eps}),
    "yopo": (
        PIECEWISE | {"epochs": 12, "peak": 0.04, "batch_size": 256, "milestones": (10 / 12, 11.3 / 12)},
        lambda eps: {"outer": 5, "inner": 3, "step_size": 2 / 255},
    ),
    "fgsm-rs": (CYCLIC | {"peak": 0.2}, lambda eps: {"step_size": 1.25 * eps}),
    "fgsm-ga": (
        CYCLIC | {"peak": 0.3, "peak_at": 0.4},
        lambda eps: {},  # its weight depends on the data too; see below
    ),
    "ssat": (CYCLIC | {"peak": 0.3}, lambda eps: {"checkpoints": 3, "step_size": 1.25 * eps}),
    "atta": (PIECEWISE, lambda eps: {"step_size": 4 / 255, "reset_every": 10}),
    "atas": (
        PIECEWISE,
        lambda eps: {
            "c": 1.28,
            "max_step": 16 / 255,
            "beta": 0.5,
            "clip": (4 / 255, 14 / 255),
            "warmup_epochs": 5,
            "reset_every": 10,
        },
    ),
}
GRAD_ALIGN_WEIGHTS = {"cifar10": {8: 0.2, 12: 0.632, 16: 2.0}, "cifar100": {4: 0.2, 8: 0.5, 12: 1.0}}
OTHERS = {
    "cifar10-preact-resnet18-standard": (PIECEWISE, {}),
    "cifar10-preact-resnet18-fgsm": (CYCLIC | {"peak": 0.2}, {}),
    "cifar10-preact-resnet18-fgsm-rs-adaptive": (
        CYCLIC | {"peak": 0.2},
        {"c": 1.28, "max_step": 16 / 255, "beta": 0.5},
    ),
    "cifar10-preact-resnet18-atas-literal": (
        PIECEWISE,
        {"c": 1.28, "max_step": 16 / 255, "beta": 0.5, "clip": None, "warmup_epochs": 0, "reset_every": 10},
    ),
    "cifar10-preact-resnet18-trades": (PIECEWISE, {"beta": 6.0, "steps": 10, "step_size": 2 / 255}),
    "cifar10-preact-resnet18-fgsm-pgi": (
        PIECEWISE,
        {"step_size": 8 / 255, "smoothing": 0.4, "consistency.weight": 10, "decay": 0.3, "reset_every": 40},
    ),
    "cifar10-preact-resnet18-zerograd": (
        CYCLIC | {"peak": 0.2, "peak_momentum": None},
        {"quantile": 0.35, "step_size": 16 / 255},
    ),
    "cifar10-preact-resnet18-multigrad": (
        CYCLIC | {"peak": 0.2, "peak_momentum": None},
        {"starts": 3, "step_size": 16 / 255},
    ),
    "cifar10-preact-resnet18-elle": (
        CYCLIC | {"peak": 0.2, "peak_momentum": 0.8},
        {"weight": 4000, "adaptive": True, "decay": 0.99, "sensitivity": 2.0},
    ),
    "cifar10-preact-resnet18-aaer": (
        CYCLIC | {"peak": 0.2, "peak_momentum": 0.8},
        {"step_size": 8 / 255, "logit_weight": 0.15, "loss_weight": 0.0},
    ),
    "cifar10-preact-resnet18-sora": (
        CYCLIC | {"peak": 0.2, "peak_momentum": 0.8, "final": 0.01 / 0.2},
        {"max_step": 16 / 255, "curvature": 0.02, "decay": 0.95},
    ),
}

ROWS = [
    (data, network, method, eps)
    for data, network, method in itertools.product(BUDGETS, NETWORKS, PAPER)
    for eps in BUDGETS[data]
]


def name_of(data, network, method, eps):
    return f"{data}-{network}-{method}" + ("" if eps == 8 else f"-eps{eps}")


def check_settings(loaded, common, own):
    found = {
        "schedule": loaded.schedule.name,
        "peak": loaded.schedule.peak,
        "milestones": loaded.schedule.milestones,
        "peak_at": loaded.schedule.peak_at,
        "peak_momentum": loaded.schedule.peak_momentum,
        "final": loaded.schedule.final,
        "epochs": loaded.training.epochs,
        "batch_size": loaded.training.batch_size,
    }
    for key, value in common.items():
        assert found[key] == (value if isinstance(value, str) else pytest.approx(value)), key
    assert loaded.schedule.factor == 0.1
    assert (loaded.optimizer.momentum, loaded.optimizer.weight_decay) == (0.9, 5e-4)
    assert not loaded.optimizer.nesterov
    assert (loaded.data.pad, loaded.data.flip) == (4, True)
    assert loaded.model.mean == (0.485, 0.456, 0.406)
    assert loaded.model.std == (0.229, 0.224, 0.225)
    assert loaded.training.ema == 0
    assert loaded.training.on_collapse == "warn"
    watched = resolve_probe(loaded, 50_000).training  # the smallest of these training sets
    assert (watched.probe, watched.probe_every) == (1000, None)
    classes = {"classes": 10} if methods.takes_classes(loaded.method.name) else {}
    method = methods.create(loaded.method.name, loaded.threat, 4, (3, 32, 32), **classes, **loaded.method.settings)
    for key, value in own.items():
        assert attrgetter(key)(method) == (value if value is None else pytest.approx(value, rel=1e-3)), key


CONSTRAINT = {"gamma": 0.03, "ratio": 1.0, "stride": 1, "drops": (100 / 110, 105 / 110), "step_size": 8 / 255}

# Schedule, peak rate, batch, weight decay and average, and what the method has; the authors' settings in 30 epochs.
LATER = {
    "n-fgsm": (CYCLIC | {"peak": 0.2}, {"schedule.peak_momentum": 0.8}, {"noise": 16 / 255, "step_size": 8 / 255}),
    "mart": (
        PIECEWISE | {"peak": 0.01, "milestones": (74 / 120, 89 / 120, 99 / 120)},
        {"optimizer.weight_decay": 3.5e-3},
        {"beta": 5.0, "steps": 10, "step_size": 0.007},
    ),
    "gat": (
        PIECEWISE | {"milestones": (0.71, 0.86), "batch_size": 64},
        {},
        {"weight": 10.0, "late_factor": 4.0, "late_from": 0.86, "noise": 4 / 255, "step_size": 8 / 255},
    ),
    "nuat": (
        CYCLIC | {"peak": 0.1, "peak_at": 0.4, "batch_size": 64},
        {"schedule.peak_momentum": 0.8},
        {"weight": 4.5, "ramp": 0.9, "noise": 4 / 255, "step_size": 8 / 255},
    ),
    "liet": (
        {"schedule": "cosine", "peak": 0.1, "epochs": 30, "batch_size": 128},
        {"training.ema": 0.9995, "schedule.warmup": 0.3},
        {
            "ratio": (0.1, 0.5),
            "refresh_every": 20,
            "step_size": 8 / 255,
            "targets.smoothing": 0.6,
            "consistency.weight": 100,
        },
    ),
    "tdat": (
        PIECEWISE | {"milestones": (100 / 110, 105 / 110)},
        {},
        {"weight": 0.65, "step_size": 8 / 255, "targets.factor": 0.6, "targets.floor": 0.15},
    ),
    "slat": (
        CYCLIC | {"peak": 0.2, "peak_at": 0.4},
        {"schedule.peak_momentum": 0.8},
        {"layers": None, "step_size": 7.2 / 255, "layer_step_size": 14.4 / 255},
    ),
    "fgsm-pco": (
        PIECEWISE | {"milestones": (100 / 110, 105 / 110)},
        {},
        {"step_size": 8 / 255, "smoothing": 0.4, "weight": 10.0, "stretch": 1.5},
    ),
    "fgsm-pgk": (
        PIECEWISE,
        {"training.ema": 0.999},
        {"smoothing": 0.5, "decay": 0.3, "reset_every": 10, "threshold": 0.82, "consistency.weight": 5.6},
    ),
    "fgsm-rs-cs": (
        PIECEWISE | {"milestones": (100 / 110, 105 / 110)},
        {},
        CONSTRAINT,
    ),
    "fgsm-mep-cs": (
        PIECEWISE | {"milestones": (100 / 110, 105 / 110)},
        {},
        CONSTRAINT | {"smoothing": 0.4, "decay": 0.3, "reset_every": 40, "consistency": None},
    ),
    "fgsm-uap": (
        PIECEWISE | {"milestones": (100 / 110, 105 / 110)},
        {"training.ema": 0.9995},
        {"radius": 10 / 255, "smoothing": 0.4, "decay": 0.3, "consistency.weight": 10.0},
    ),
}


@pytest.mark.parametrize("method", LATER)
def test_later_methods(method):
    """They have not been measured, and say so."""
    loaded = recipes.load(f"cifar10-preact-resnet18-{method}")
    assert (loaded.method.name, loaded.method.norm, loaded.method.eps) == (method, "linf", 8 / 255)
    common, values, own = LATER[method]
    for key, value in values.items():
        section, _, name = key.partition(".")
        assert getattr(getattr(loaded, section), name) == value, key
    usual = {"optimizer.weight_decay": 5e-4, "training.ema": 0}
    check_settings(loaded.with_values({key: usual[key] for key in values if key in usual}), common, own)
    text = resources.files("atas.recipes").joinpath(f"{loaded.name}.toml").read_text(encoding="utf-8")
    assert "has not been measured here" in text
    assert "\n[expected]" not in text


@pytest.mark.parametrize("method", LATER)
def test_the_defaults_of_later_methods_are_those_of_their_recipes(method):
    defaults = methods.settings(method)
    settings = recipes.load(f"cifar10-preact-resnet18-{method}").method.settings
    assert not settings.keys() - defaults.keys()
    for name, default in defaults.items():
        if isinstance(default, float | tuple) or name in ("steps", "refresh_every", "reset_every", "stride"):
            assert settings[name] == default, name


@pytest.mark.parametrize(("data", "network", "method", "eps"), ROWS, ids=lambda part: str(part))
def test_every_row_of_the_paper(data, network, method, eps):
    loaded = recipes.load(name_of(data, network, method, eps))
    assert (loaded.data.name, loaded.model.name, loaded.method.name) == (data, network, method)
    assert (loaded.method.norm, loaded.method.eps) == ("linf", eps / 255)
    assert repr(loaded.threat) == f"Linf({eps}/255)"
    common, own = PAPER[method]
    extra = {"weight": GRAD_ALIGN_WEIGHTS[data][eps]} if method == "fgsm-ga" else {}
    check_settings(loaded, common, own(eps / 255) | extra)


@pytest.mark.parametrize("name", OTHERS)
def test_methods_beside_the_tables(name):
    loaded = recipes.load(name)
    assert loaded.method.name == name.removeprefix("cifar10-preact-resnet18-")
    assert loaded.method.eps == 8 / 255
    check_settings(loaded, *OTHERS[name])


def test_every_method_has_a_recipe_and_the_demo_its_three():
    made_for = {recipes.load(name).method.name for name in recipes.names() if name.startswith("cifar10")}
    assert made_for == set(methods.names())
    demo = {recipes.load(name).method.name for name in recipes.names() if name.startswith("digits-")}
    assert demo >= {"fgsm-rs", "atta", "atas"}


@pytest.mark.parametrize("name", recipes.names())
def test_the_first_line_is_the_command(name):
    text = resources.files("atas.recipes").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    assert text.splitlines()[0].startswith(f"# atas train {name}")
    assert text.splitlines()[0].split() == ["#", "atas", "train", name]


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_survives_writing_and_reading(name, tmp_path):
    loaded = recipes.load(name)
    assert loaded.name == name
    (tmp_path / "other.toml").write_text(loaded.to_toml(), encoding="utf-8")
    again = recipes.load(tmp_path / "other.toml")
    assert again == loaded
    assert again.to_toml() == loaded.to_toml()
    assert "extends" not in tomllib.loads(loaded.to_toml())


def test_recipes_differ_from_each_other():
    """A copy under a new name would be found here."""
    seen = {}
    for name in recipes.names():
        document = recipes.load(name).to_dict()
        document.pop("name")
        assert seen.setdefault(repr(document), name) == name


# Schedules, by update; 50,000 images are 391 batches of 128 and 196 of 256.


def rates(name, steps_per_epoch, updates_per_step=1):
    loaded = recipes.load(name)
    updates = loaded.training.epochs * steps_per_epoch * updates_per_step
    return learning_rate(loaded.schedule, torch.arange(updates), updates).tolist()


@pytest.mark.parametrize("method", ["standard", "atas", "atta", "pgd", "trades", "atas-literal"])
def test_drops_fall_on_the_first_update_of_epochs_25_and_29(method):
    found = rates(f"cifar10-preact-resnet18-{method}", 391)
    assert found[: 24 * 391] == [0.1] * (24 * 391)
    assert found[24 * 391 : 28 * 391] == pytest.approx([0.01] * (4 * 391))
    assert found[28 * 391 :] == pytest.approx([0.001] * (2 * 391))


def test_drops_of_yopo():
    found = rates("cifar10-preact-resnet18-yopo", 196)
    changes = [update for update in range(1, len(found)) if found[update] != found[update - 1]]
    assert changes == [10 * 196, round(11.3 * 196)]


@pytest.mark.parametrize(
    ("name", "peak", "share", "replays"), [("fgsm-rs", 0.2, 0.5, 1), ("fgsm-ga", 0.3, 0.4, 1), ("free", 0.04, 0.5, 8)]
)
def test_cyclic_rates_are_a_triangle(name, peak, share, replays):
    found = torch.tensor(rates(f"cifar10-preact-resnet18-{name}", 391, replays), dtype=torch.float64)
    summit = round(share * len(found))
    assert found[0] == 0
    assert int(found.argmax()) == summit
    assert found[summit] == pytest.approx(peak)
    up, down = found[: summit + 1].diff(), found[summit:].diff()
    torch.testing.assert_close(up, torch.full_like(up, peak / summit))
    torch.testing.assert_close(down, torch.full_like(down, -peak / (len(found) - summit)))
    assert 0 < found[-1] < 2 * peak / summit


@pytest.mark.parametrize(
    ("name", "epochs", "ema", "peak_at", "share", "decay"),
    [
        ("sprint", 10, 0.998, 0.4, 0.2, 0.7),
        ("30s", 30, 0.999, 0.4, 0.4, 0.7),
        ("100s", 100, 0.9995, 0.1, 0.7, 0.9),
        ("300s", 300, 0.9998, 0.1, 0.7, 0.9),
    ],
)
def test_atas_plus_by_the_length_of_its_training(name, epochs, ema, peak_at, share, decay):
    loaded = recipes.load(f"cifar10-preact-resnet18-plus-{name}")
    assert (loaded.method.name, loaded.training.epochs, loaded.training.ema) == ("atas-plus", epochs, ema)
    schedule = loaded.schedule
    assert (schedule.name, schedule.peak, schedule.peak_at, schedule.final) == ("cyclic", 0.2, peak_at, 0.05)
    method = methods.create(loaded.method.name, loaded.threat, 4, (3, 32, 32), classes=10, **loaded.method.settings)
    targets = method.targets
    assert (targets.share, targets.decay, targets.smoothing) == (share, decay, 0.1)
    assert targets.from_epoch == method.warmup_epochs == (2 if name == "sprint" else 5)
