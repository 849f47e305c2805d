"""Methods by name: the built-in ones and a user's own."""

import sys

import pytest
import torch

import atas
from atas.distributed.sharding import DataShard
from atas.errors import UsageError
from atas.training.build import build_method

SOURCE = """
from atas.core.autograd import input_gradient
from typing import Unpack

from atas.methods import ATAS, InputPerturbation
from atas.methods.atas import ATASArgs

class HalfStep(InputPerturbation):
    def __init__(self, threat, examples, shape, *, fraction: float = 0.5, **common):
        super().__init__(threat, examples, shape, **common)
        self.fraction = fraction

    def attack(self, model, batch):
        gradient, _ = input_gradient(model, batch.x, batch.y, self.attack_loss)
        return self.threat.ascend(batch.x, gradient, self.fraction * self.threat.eps, batch.x)

class Untyped(HalfStep):
    def __init__(self, threat, examples, shape, *, fraction=0.5, **common):
        super().__init__(threat, examples, shape, fraction=fraction, **common)

class Forward(HalfStep):
    def __init__(self, threat, examples, shape, *, fraction: "Nowhere" = 0.5, **common):
        super().__init__(threat, examples, shape, **common)

class Failing(HalfStep):
    def __init__(self, threat, examples, shape, **common):
        raise KeyError("no such thing")

class Longer(ATAS):
    def __init__(self, threat, examples, shape, *, longer: int = 2, **settings: Unpack[ATASArgs]):
        super().__init__(threat, examples, shape, **settings)

class PerPosition(HalfStep):
    def __init__(self, threat, examples, shape, *, classes: int, batch_size: int = 7, **common):
        super().__init__(threat, examples, shape, **common)
        self.sizes = classes, batch_size

class NotAMethod:
    pass
"""


@pytest.fixture(autouse=True)
def users_module(tmp_path, monkeypatch):
    (tmp_path / "users_methods.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("users_methods", None)


def test_a_users_own_method_is_created_by_its_path():
    threat = atas.Linf(0.1)
    method = atas.methods.create("users_methods:HalfStep", threat, 4, (1, 2, 2), fraction=0.25)
    assert atas.methods.settings("users_methods:HalfStep") == {"fraction": 0.5}
    method.start_epoch(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 3))
    x, y = torch.full((4, 1, 2, 2), 0.5), torch.tensor([0, 1, 2, 0])
    moved = method.perturb(model, x, y, torch.arange(4))
    torch.testing.assert_close((moved - x).abs(), torch.full_like(x, 0.025))


@pytest.mark.slow
def test_a_users_own_method_is_trained_by_recipe(tmp_path):
    recipe = atas.recipes.load("digits-small-cnn-standard").with_values(
        {"method.name": "users_methods:HalfStep", "training.epochs": 1, "engine.device": "cpu", "training.loggers": ()}
    )
    data = atas.data.load("digits")
    few = atas.data.Dataset("digits", data.train.subset(slice(100)), data.test.subset(slice(20)))
    run = atas.train(recipe, out=tmp_path / "run", data=few)
    assert run.recipe.method.name == "users_methods:HalfStep"


def test_a_users_own_method_gets_the_numbers_that_only_the_training_knows():
    recipe = atas.recipes.load("digits-small-cnn-standard").with_values(
        {"method.name": "users_methods:PerPosition", "training.batch_size": 24}
    )
    shard = DataShard.for_rank(100, 2, 0, 2)
    method = build_method(recipe, shard, (1, 8, 8), 10, torch.device("cpu"))
    assert method.sizes == (10, 12), "the number of outputs, and this process's share of a batch"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("users_methods:NotAMethod", "is not a training method"),
        ("users_methods:Missing", "has no class 'Missing'"),
        ("users_nowhere:Method", "cannot import 'users_nowhere' for the method"),
        ("users methods:X", "does not name a method; write your own one as package.module:class"),
        ("atass", "did you mean 'atas'"),
    ],
)
def test_wrong_names_are_explained(name, message):
    with pytest.raises(UsageError, match=message):
        atas.methods.get(name)


class PerClass(atas.methods.ATTA):
    """A user's method with a row for each class, which is equal in all processes."""

    replicated_buffers = frozenset({"universal"})

    def __init__(self, threat, examples, shape, **common):
        super().__init__(threat, examples, shape, **common)
        self.register_buffer("universal", torch.zeros(10, *shape))


def test_tensors_with_rows_of_a_process():
    targets = atas.methods.RememberedPredictions(4)
    method = PerClass(atas.Linf(8 / 255), 6, (3, 8, 8), targets=targets)
    assert method.sharded_tensors() == {"memory.delta", "targets.average"}
    assert set(method.state_dict()) == {"epoch", "step_scale", "universal", "memory.delta", "targets.average"}


@pytest.mark.parametrize(
    ("name", "own", "lacks"),
    [
        ("atas-literal", {}, {"clip", "warmup_epochs", "write_back", "attack_mode"}),
        (
            "atas-plus",
            {"smoothing": 0.1, "share": 0.4, "decay": 0.7, "from_epoch": 5},
            {"write_back", "attack_mode"},
        ),
        ("users_methods:Longer", {"longer": 2}, {"write_back", "attack_mode"}),
    ],
)
def test_settings_that_are_handed_on_are_those_of_the_base_class(name, own, lacks):
    base, types = atas.methods.settings("atas"), atas.methods.setting_types("atas")
    handed_on = {key: default for key, default in base.items() if key not in lacks}
    assert list(atas.methods.settings(name).items()) == list((own | handed_on).items())
    found = atas.methods.setting_types(name)
    assert {key: found[key] for key in handed_on} == {key: types[key] for key in handed_on}
    assert {found[key] for key in own} <= {int, float}
    classes = {"classes": 3} if name == "atas-plus" else {}
    method = atas.methods.create(name, atas.Linf(0.1), 4, (1, 2, 2), beta=0.25, c="auto", **classes)
    assert method.beta == 0.25


def test_a_setting_without_a_type_takes_what_is_given():
    recipe = atas.recipes.load("digits-small-cnn-standard")
    changed = recipe.with_values({"method.name": "users_methods:Untyped", "method.fraction": "1/4"})
    assert changed.method.settings == {"fraction": 0.25}


def test_code_that_fails_is_named():
    message = "annotations of method 'users_methods:Forward' cannot be read: NameError"
    with pytest.raises(UsageError, match=message):
        atas.methods.setting_types("users_methods:Forward")
    message = "'users_methods:Failing' failed to make a method: KeyError: 'no such thing'"
    with pytest.raises(UsageError, match=message):
        atas.methods.create("users_methods:Failing", atas.Linf(0.1), 4, (1, 2, 2))
