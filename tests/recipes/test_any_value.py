"""Whatever a recipe holds, it is accepted or refused in one sentence; what is accepted can be saved and read again."""

import datetime
import json
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atas import methods, recipes
from atas.errors import UsageError
from atas.recipes.fingerprint import recipe_fingerprint
from atas.recipes.schema import from_dict, section_types

BASE = recipes.load("digits-small-cnn-atas")
KEYS = [
    f"{section}.{key}"
    for section, entries in from_dict({}, "all").to_dict().items()
    if section != "name"
    for key in entries
]
KEYS += [
    f"data.{key}" for key in ("root", "size", "view_size", "view_start", "view_ramp", "view_scale", "workers", "shards")
]
KEYS += ["model.mean", "model.std", "evaluation.examples", "evaluation.batch_size", "schedule.peak_momentum"]
KEYS += [f"method.{key}" for key in methods.settings("atas")]

TEXTS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["none", "auto", "8/255", "1/0", "nan", "inf", "-1", "1e999", "9" * 400, "../x", "a:b", "\ud800", "true"]
    ),
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.integers(),
    st.sampled_from([10**19, -(10**19), 10**400, 2**63, 0, 1]),
    st.floats(),
    TEXTS,
    st.just(datetime.date(2020, 1, 1)),
    st.just(datetime.time(1)),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


def check(make):
    try:
        recipe = make()
    except UsageError as error:
        text = str(error)
        assert len(text) < 2000, "no sentence"
        assert "\n" not in text
        return
    assert len(recipe_fingerprint(recipe)) == 16
    json.dumps(recipe.to_dict(), default=str)
    again = from_dict(tomllib.loads(recipe.to_toml()), "again", trusted=recipe.trusted)
    assert again == recipe


@pytest.mark.slow
@given(st.sampled_from(KEYS), VALUES)
@settings(max_examples=400)
def test_any_value_of_any_key(key, value):
    check(lambda: BASE.with_values({key: value}))


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from([*section_types(), "name", "extends", "trusted", "x"]), VALUES, max_size=4))
@settings(max_examples=150)
def test_any_document(document):
    check(lambda: from_dict(document, "any"))
    check(lambda: from_dict(document, "any", trusted=False))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("engine.device", "gpu", "engine.device: there is no device 'gpu'; use auto, cpu or cuda"),
        ("engine.device", "cuda:", "engine.device: there is no device 'cuda:'"),
        ("model.std", [0], "model.std must be above zero; got 0.0"),
        ("model.std", [0.5, -1, 0.5], "model.std must be above zero; got -1.0"),
        ("model.std", [], "model.std must have one number, or one for each channel"),
        ("model.mean", [], "model.mean must have one number, or one for each channel"),
        ("evaluation.attacks", 5.5, "evaluation.attacks must be a list of names; got 5.5"),
        ("evaluation.attacks", [5.5], "evaluation.attacks must be a list of names"),
        ("evaluation.attacks", [["pgd10"]], "evaluation.attacks must be a list of names"),
        ("schedule.milestones", "half", "schedule.milestones must be a list of numbers"),
        ("data.pad", 10**400, "data.pad must be a whole number"),
        ("training.batch_size", 10**30, "training.batch_size must be a whole number of at most 64 bits; got 1000"),
        ("training.epochs", float("nan"), "training.epochs must be a whole number"),
        ("method.eps", float("inf"), "method.eps must be a number"),
        ("method.eps", 10**400, "method.eps must be a number"),
        ("schedule.peak", "1e999", "schedule.peak must be a number"),
        ("data.root", "a\0b", "data.root cannot be the name of a folder: it has a zero byte"),
    ],
)
def test_values_that_were_accepted_or_misread(key, value, message):
    with pytest.raises(UsageError, match=message.replace("[", r"\[")):
        BASE.with_values({key: value})


def test_nesterov_needs_momentum():
    with pytest.raises(UsageError, match=r"optimizer.nesterov needs optimizer.momentum above zero"):
        BASE.with_values({"optimizer.nesterov": True, "optimizer.momentum": 0})


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1"])
def test_devices(device):
    assert BASE.with_values({"engine.device": device}).engine.device == device


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\xfe",
        b"a = " + b"[" * 100_000,
        b"[a" + b".a" * 5_000 + b"]\nb = 1",
        b"[data]\nname = 5979-99-99",
        b"[data]\npad = " + b"9" * 5_000,
        b"data = 1",
        b"[[data]]\npad = 1",
        b'[data.name]\nx = "digits"',
        b"extends = 5",
        b'extends = "self.toml"',
        b'extends = "../../nowhere.toml"',
        b'extends = "a\\u0000b.toml"',
        b'name = ["a"]\n[data]\npad = 1',
        b"trusted = true\n[data]\npad = 1",
        b"",
    ],
)
def test_files_that_are_no_recipes(content, tmp_path):
    path = tmp_path / "self.toml"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        recipes.load(path)
    assert len(str(caught.value)) < 1500
