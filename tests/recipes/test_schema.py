"""Recipes as files: reading, writing, extending, overriding, and what a mistake in one is answered with."""

import dataclasses
import re
import tomllib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atas import methods, recipes
from atas.errors import UsageError
from atas.recipes import Recipe, fingerprint, from_dict, load
from atas.recipes.values import format_toml, parse_fraction

numbers = st.floats(allow_nan=False, allow_infinity=False)
positive = st.floats(min_value=1e-300, max_value=1e300)
levels = st.integers(1, 254).map(lambda k: k / 255)
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


def one_of_us(call, *parts):
    """The call fails with one sentence that holds these parts."""
    with pytest.raises(UsageError) as error:
        call()
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 1000, f"{len(text)} characters are no sentence"
    for part in parts:
        assert part in text, text


@st.composite
def any_recipe(draw):
    """Valid recipes with values from everywhere in their ranges."""
    method = draw(st.sampled_from(methods.names()))
    own = {
        "fgsm-rs": st.fixed_dictionaries({}, optional={"step_size": levels | positive}),
        "free": st.fixed_dictionaries({}, optional={"replays": st.integers(1, 20), "step_size": levels}),
        "yopo": st.fixed_dictionaries({}, optional={"layer": st.sampled_from(["conv1", "features.0"])}),
        "atas": st.fixed_dictionaries(
            {}, optional={"clip": st.tuples(levels, levels), "dtype": st.sampled_from(["int8", "float32"])}
        ),
    }
    share = st.floats(0, 1, exclude_min=True, exclude_max=True)
    return Recipe(
        name=draw(texts),
        data=recipes.DataConfig(
            name=draw(texts),
            root=draw(st.none() | texts),
            size=draw(st.none() | st.integers(1, 1000)),
            pad=draw(st.integers(0, 8)),
            flip=draw(st.booleans()),
        ),
        model=recipes.ModelConfig(
            name=draw(texts),
            mean=draw(st.none() | st.lists(numbers, min_size=1, max_size=3).map(tuple)),
            std=draw(st.none() | st.lists(positive, min_size=1, max_size=3).map(tuple)),
        ),
        method=recipes.MethodConfig(
            name=method,
            norm=draw(st.sampled_from(["linf", "l2"])),
            eps=draw(levels | st.floats(0, 1)),
            settings=draw(own.get(method, st.just({}))),
        ),
        optimizer=recipes.OptimizerConfig(
            momentum=(momentum := draw(st.floats(0, 1, exclude_max=True))),
            weight_decay=draw(st.floats(0, 1e300)),
            nesterov=draw(st.booleans()) and momentum > 0,
        ),
        schedule=recipes.ScheduleConfig(
            name=draw(st.sampled_from(["piecewise", "cyclic"])),
            peak=draw(positive),
            milestones=tuple(draw(st.lists(share, max_size=4))),
            peak_at=draw(share),
        ),
        training=recipes.TrainingConfig(
            epochs=draw(st.integers(1, 10**5)),
            batch_size=draw(st.integers(1, 10**6)),
            seed=draw(st.integers(-(2**62), 2**62)),
            ema=draw(st.floats(0, 1, exclude_max=True)),
            on_collapse=draw(st.sampled_from(["warn", "stop", "rollback"])),
            probe=draw(st.just("auto") | st.integers(1, 10**6)),
            probe_every=draw(st.none() | st.integers(1, 100)),
            checkpoint_every=draw(st.floats(0, 1e300)),
        ),
        engine=recipes.EngineConfig(precision=draw(st.sampled_from(["auto", "bf16", "float32"]))),
        evaluation=recipes.EvaluationConfig(
            attacks=tuple(draw(st.lists(st.sampled_from(["fgsm", "pgd10", "pgd7x3"]), max_size=3))),
            examples=draw(st.none() | st.integers(1, 10**6)),
            batch_size=draw(st.none() | st.integers(1, 10**6)),
        ),
    )


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=any_recipe())
def test_any_recipe_survives_writing_and_reading(made, tmp_path):
    path = tmp_path / "made.toml"
    path.write_text(made.to_toml(), encoding="utf-8")
    assert load(path) == made
    assert from_dict(made.to_dict(), "other") == made


@given(k=st.integers(1, 254))
def test_whole_grey_levels_are_written_as_such(k):
    assert format_toml(k / 255, as_255ths=True) == f'"{k}/255"'
    assert format_toml(k / 255) == repr(k / 255)
    assert parse_fraction(f"{k}/255") == k / 255


@pytest.mark.parametrize(
    ("text", "value"),
    [("8/255", 8 / 255), (" 24 / 30 ", 0.8), ("11.3/12", 11.3 / 12), ("-1/4", -0.25), ("1e-3", 1e-3), (".5", 0.5)],
)
def test_fractions(text, value):
    assert parse_fraction(text) == value


@pytest.mark.parametrize(
    "text", ["", "eight", "8/", "/255", "1/0", "1/2/3", "8/255 px", "nan", "inf", "__import__('os')"]
)
def test_text_that_is_no_fraction_is_refused(text):
    assert parse_fraction(text) is None


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


# extends


def test_extends_states_only_what_differs(tmp_path):
    path = write(tmp_path, "mine.toml", 'extends = "cifar10-preact-resnet18-atas"\n[training]\nepochs = 10\n')
    base, loaded = load("cifar10-preact-resnet18-atas"), load(path)
    assert loaded.name == "mine"
    assert fingerprint.differences(base, loaded) == ["training.epochs: 30 became 10"]


def test_extends_to_any_depth_and_by_path(tmp_path):
    write(tmp_path, "far/a.toml", 'extends = "cifar10-preact-resnet18-atas"\n[training]\nepochs = 1\nseed = 1\n')
    write(tmp_path, "far/b.toml", 'extends = "a.toml"\n[training]\nseed = 2\nprobe = 2\n')
    write(tmp_path, "near/c.toml", 'extends = "../far/b.toml"\n[training]\nprobe = 3\n')
    path = write(tmp_path, "d.toml", 'extends = "near/c.toml"\nname = "deep"\n')
    loaded = load(path)
    assert (loaded.training.epochs, loaded.training.seed, loaded.training.probe) == (1, 2, 3)
    assert (loaded.name, loaded.method.name) == ("deep", "atas")
    assert load(tmp_path / "near" / "c.toml").name == "c"


def test_extends_in_a_circle(tmp_path):
    write(tmp_path, "a.toml", 'extends = "b.toml"\n')
    write(tmp_path, "b.toml", 'extends = "c.toml"\n')
    write(tmp_path, "c.toml", 'extends = "a.toml"\n')
    one_of_us(lambda: load(tmp_path / "a.toml"), "recipe 'a' extends itself: a -> b -> c -> a")
    write(tmp_path, "self.toml", 'extends = "self.toml"\n')
    one_of_us(lambda: load(tmp_path / "self.toml"), "extends itself")


def test_a_file_may_have_the_name_of_what_it_extends(tmp_path):
    """A packaged recipe with one change, kept under its own name, is no circle."""
    name = "cifar10-preact-resnet18-atas"
    path = write(tmp_path, f"{name}.toml", f'extends = "{name}"\n[training]\nepochs = 10\n')
    assert load(path).training.epochs == 10


def test_extends_a_recipe_that_leaves_the_method_to_the_default(tmp_path):
    write(tmp_path, "base.toml", "[training]\nepochs = 3\n")
    path = write(tmp_path, "mine.toml", 'extends = "base.toml"\n[method]\neps = "4/255"\n')
    loaded = load(path)
    assert (loaded.training.epochs, loaded.method.name, loaded.method.eps) == (3, "atas", 4 / 255)


def test_extends_what_is_not_there(tmp_path):
    write(tmp_path, "a.toml", 'extends = "b.toml"\n')
    one_of_us(lambda: load(tmp_path / "a.toml"), "there is no recipe file", "b.toml")
    write(tmp_path, "a.toml", "extends = 3\n")
    one_of_us(lambda: load(tmp_path / "a.toml"), "must be the name of one recipe")


def test_extends_an_unknown_recipe(tmp_path):
    write(tmp_path, "a.toml", 'extends = "cifar10-preact-resnet18-atass"\n')
    one_of_us(lambda: load(tmp_path / "a.toml"), "unknown recipe", "did you mean 'cifar10-preact-resnet18-atas'?")


def test_settings_of_another_method_are_not_inherited(tmp_path):
    text = 'extends = "cifar10-preact-resnet18-atas-eps12"\n[method]\nname = "fgsm-rs"\nstep_size = "9/255"\n'
    loaded = load(write(tmp_path, "mine.toml", text))
    assert dict(loaded.method.settings) == {"step_size": 9 / 255}
    assert loaded.method.eps == 12 / 255
    text = 'extends = "cifar10-preact-resnet18-atas"\n[method]\nname = "atas"\nc = 2\n'
    loaded = load(write(tmp_path, "mine.toml", text))
    assert loaded.method.settings["c"] == 2
    assert loaded.method.settings["warmup_epochs"] == 5


# with_values and assignments


def test_values_override():
    base = load("cifar10-preact-resnet18-atas")
    changed = base.with_values({"training.epochs": 10, "method.eps": "4/255", "method.c": 0.5, "schedule.peak": 1})
    assert (changed.training.epochs, changed.method.eps, changed.schedule.peak) == (10, 4 / 255, 1.0)
    assert changed.method.settings["c"] == 0.5
    assert changed.method.settings["clip"] == (4 / 255, 14 / 255)
    assert base == load("cifar10-preact-resnet18-atas")
    assert changed.name == base.name


SIZES = {"method.max_step": "2eps", "method.clip": ["0.5 eps", 0.3]}


def test_sizes_that_follow_the_budget_stay_texts(tmp_path):
    recipe = load("digits-small-cnn-atas").with_values(SIZES)
    assert recipe.method.settings["max_step"] == "2 eps"
    assert recipe.method.settings["clip"] == ("0.5 eps", 0.3)
    assert 'clip = ["0.5 eps", 0.3]' in recipe.to_toml()
    assert load(write(tmp_path, "saved.toml", recipe.to_toml())).to_dict() == recipe.to_dict()
    for eps in (0.2, 0.1):
        changed = recipe.with_values({"method.eps": eps})
        method = methods.create("atas", changed.threat, 2, (1, 8, 8), **changed.method.settings)
        assert (method.max_step, method.clip) == (2 * eps, (0.5 * eps, 0.3))


def test_fingerprints_do_not_depend_on_how_a_size_is_written():
    recipe = load("digits-small-cnn-atas")
    other = recipe.with_values({"method.max_step": 0.78})
    assert recipe.method.settings["max_step"] == "2 eps"
    assert fingerprint.recipe_fingerprint(other) == fingerprint.recipe_fingerprint(recipe)
    assert fingerprint.differences(recipe, other) == []
    longer = recipe.with_values({"method.max_step": "3 eps"})
    assert fingerprint.recipe_fingerprint(longer) != fingerprint.recipe_fingerprint(recipe)
    assert fingerprint.differences(recipe, longer) == ["method.max_step: 2 eps became 3 eps"]
    assert fingerprint.differences(recipe, recipe.with_values({"method.eps": 0.2})) == ["method.eps: 0.39 became 0.2"]


@pytest.mark.parametrize("value", ["2 epochs", "-2 eps", "0 eps", "1e999 eps", "eps", "eps 2", ["2 eps"]])
def test_texts_that_are_no_size(value):
    recipe = load("digits-small-cnn-atas")
    one_of_us(lambda: recipe.with_values({"method.max_step": value}), "method.max_step must be", "such as '2 eps'")
    words = "method.clip must be a list of 2 numbers or multiples of eps or 'auto' or 'none'"
    one_of_us(lambda: recipe.with_values({"method.clip": [0.1, value]}), words)
    one_of_us(lambda: recipe.with_values({"method.eps": "2 eps"}), "method.eps must be a number")


def test_another_method_drops_the_settings_of_the_old_one():
    changed = load("cifar10-preact-resnet18-atas-eps12").with_values({"method.name": "fgsm-rs"})
    assert dict(changed.method.settings) == {}
    assert changed.method.eps == 12 / 255
    same = load("cifar10-preact-resnet18-atas").with_values({"method.name": "atas"})
    assert same == load("cifar10-preact-resnet18-atas")


@pytest.mark.parametrize("keys", [("method.name", "method.replays"), ("method.replays", "method.name")])
def test_the_order_of_overrides_does_not_matter(keys):
    values = {"method.name": "free", "method.replays": 4}
    changed = load("cifar10-preact-resnet18-atas").with_values({key: values[key] for key in keys})
    assert dict(changed.method.settings) == {"replays": 4}


def test_a_model_of_the_users_own_takes_the_place_of_the_recipes():
    """Its normalisation is its own, so that of the recipe's model must not be in its way."""
    changed = load("cifar10-preact-resnet18-atas").with_values({"model.name": "package.module:function"})
    assert changed.model == recipes.ModelConfig(name="package.module:function")


def test_a_layer_may_be_named_by_a_number():
    """That is how the layers of an nn.Sequential are named."""
    changed = load("cifar10-preact-resnet18-yopo").with_values({"method.layer": "0"})
    assert changed.method.settings["layer"] == "0"


# Mistakes


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("training.epoch", "training.epochs"),
        ("training.batchsize", "training.batch_size"),
        ("schedule.milestone", "schedule.milestones"),
        ("method.warmup_epoch", "method.warmup_epochs"),
        ("method.max_steps", "method.max_step"),
        ("optimizer.weightdecay", "optimizer.weight_decay"),
        ("engine.devices", "engine.device"),
        ("optimizer.lr", "schedule.peak"),
        ("training.eps", "method.eps"),
        ("data.batch_size", "training.batch_size"),
    ],
)
def test_an_unknown_key(key, nearest, tmp_path):
    one_of_us(
        lambda: load("cifar10-preact-resnet18-atas").with_values({key: 1}),
        f"unknown recipe key '{key}'; did you mean '{nearest}'?",
    )
    section, name = key.split(".")
    path = write(tmp_path, "mine.toml", f'extends = "cifar10-preact-resnet18-atas"\n[{section}]\n{name} = 1\n')
    one_of_us(lambda: load(path), f"did you mean '{nearest}'?")


def test_an_unknown_section(tmp_path):
    one_of_us(lambda: Recipe().with_values({"trainig.epochs": 1}), "unknown section", "did you mean 'training'?")
    one_of_us(lambda: load(write(tmp_path, "a.toml", "[trainig]\nepochs = 1\n")), "did you mean 'training'?")
    one_of_us(lambda: load(write(tmp_path, "a.toml", "epochs = 1\n")), "unknown section")


def test_a_setting_of_another_method():
    one_of_us(lambda: load("cifar10-preact-resnet18-atas").with_values({"method.replays": 4}), "method.replays")


def test_an_unknown_recipe():
    one_of_us(
        lambda: load("cifar10-preact-resnet-atas"), "unknown recipe", "did you mean 'cifar10-preact-resnet18-atas'"
    )


@pytest.mark.parametrize(
    ("part", "whole"), [("cifar10", "cifar10-preact-resnet18-atas"), ("digits", "digits-small-cnn-atas")]
)
def test_the_beginning_of_a_recipe_s_name(part, whole):
    one_of_us(lambda: load(part), f"unknown recipe '{part}'; did you mean '{whole}'?")


def test_a_list_of_names_may_be_one_text():
    changed = Recipe().with_values({"evaluation.attacks": "pgd10, pgd50", "training.loggers": "tensorboard"})
    assert changed.evaluation.attacks == ("pgd10", "pgd50")
    assert changed.training.loggers == ("tensorboard",)


def test_a_folder_is_no_recipe(tmp_path):
    one_of_us(lambda: load(tmp_path), f"{tmp_path} is a folder, not a recipe", f"atas train --auto {tmp_path}")
    (arrays := tmp_path / "cells.npz").write_bytes(b"PK")
    one_of_us(lambda: load(arrays), f"{arrays} is data, not a recipe", f"atas train --auto {arrays}")
    (tmp_path / "recipe.toml").touch()
    one_of_us(lambda: load(tmp_path), f"to continue its run: atas train --resume --out {tmp_path}")


def test_a_missing_recipe_file(tmp_path):
    one_of_us(lambda: load(tmp_path / "none.toml"), "there is no recipe file", "none.toml", "atas ls recipes")


@pytest.mark.parametrize(
    ("key", "value", "parts"),
    [
        ("method.name", "atass", ("unknown method 'atass'", "did you mean 'atas'?")),
        ("method.norm", "linff", ("linff", "did you mean 'linf'?")),
        ("schedule.name", "cycle", ("schedule.name", "did you mean 'cyclic'?")),
        ("training.on_collapse", "rolback", ("training.on_collapse", "did you mean 'rollback'?")),
        ("engine.kind", "capture", ("engine.kind", "did you mean 'captured'?")),
        ("engine.precision", "float16", ("engine.precision", "'float32'")),
        ("method.eps", "-8/255", ("eps must be a number that is not negative",)),
        ("method.eps", -0.1, ("eps must be a number that is not negative",)),
        ("method.eps", 8, ("8/255",)),
        ("method.eps", "eight", ("method.eps must be a number or a fraction such as 8/255; got 'eight'",)),
        ("method.eps", float("nan"), ("method.eps must be a number",)),
        ("method.eps", float("inf"), ("method.eps must be a number",)),
        ("method.eps", True, ("method.eps must be a number",)),
        ("method.eps", [0.1], ("method.eps must be a number",)),
        ("training.epochs", 0, ("training.epochs must be at least 1; got 0",)),
        ("training.epochs", 10_000_000, ("training.epochs must be at most 100,000; got 10000000",)),
        ("training.epochs", 1.5, ("training.epochs must be a whole number; got 1.5",)),
        ("training.epochs", "ten", ("training.epochs must be a whole number; got 'ten'",)),
        ("training.epochs", True, ("training.epochs must be a whole number",)),
        ("training.batch_size", 0, ("training.batch_size must be at least 1",)),
        ("training.ema", 1.0, ("training.ema must be in [0, 1)",)),
        ("training.ema", -0.1, ("training.ema must be in [0, 1)",)),
        ("training.ema", [0.9, 1.0], ("training.ema must be in [0, 1)",)),
        ("training.ema", [0.9, 0.9], ("training.ema must list decays above 0, each once; got [0.9, 0.9]",)),
        ("training.ema", [0.9, 0.0], ("training.ema must list decays above 0",)),
        ("training.ema_warmup", -1, ("training.ema_warmup must not be negative",)),
        ("training.ema_batchnorm", "reestimate", ("did you mean 're-estimate'?",)),
        ("schedule.final", 1.1, ("schedule.final is a share of the peak in [0, 1]",)),
        ("targets.smoothing", 1.0, ("targets.smoothing must be in [0, 1)",)),
        ("targets.share", 1.1, ("targets.share must be in [0, 1]",)),
        ("targets.noise", "unifrom", ("did you mean 'uniform'?",)),
        ("targets.shair", 0.1, ("did you mean 'targets.share'?",)),
        ("consistency.weight", -1.0, ("consistency.weight must not be negative",)),
        ("consistency.distance", "kl", ("value of consistency.distance",)),
        ("training.probe", 0, ("training.probe must be at least 1 image",)),
        ("training.checkpoint_every", -1, ("training.checkpoint_every must not be negative",)),
        ("data.pad", -1, ("data.pad must not be negative",)),
        ("data.flip", "yes", ("data.flip must be true or false",)),
        ("data.flip", 1, ("data.flip must be true or false",)),
        ("data.root", 3.5, ("data.root must be a text",)),
        ("schedule.peak", 0, ("schedule.peak must be above zero",)),
        ("schedule.peak", -1, ("schedule.peak must be above zero",)),
        ("schedule.peak_at", 0, ("schedule.peak_at is a share",)),
        ("schedule.peak_at", 1, ("schedule.peak_at is a share",)),
        ("schedule.milestones", [24], ("schedule.milestones are shares of the training such as 24/30",)),
        ("schedule.milestones", "soon", ("schedule.milestones must be a list of numbers",)),
        ("schedule.factor", 0, ("schedule.factor must be in (0, 1]; got 0.0",)),
        ("schedule.peak_momentum", 1, ("schedule.peak_momentum must be in [0, 1); got 1.0",)),
        ("evaluation.attacks", 5.5, ("evaluation.attacks must be a list of names; got 5.5",)),
        ("evaluation.examples", 0, ("evaluation.examples must be at least 1; got 0",)),
        ("training.loggers", "tensorbord", ("value of training.loggers", "did you mean 'tensorboard'?")),
        ("training.seed", 2**63, ("training.seed must fit 64 bits",)),
        ("data.view", "cropp", ("value of data.view", "did you mean 'crop'?")),
        ("data.loading", "stream", ("value of data.loading", "did you mean 'streaming'?")),
        ("data.workers", 0, ("data.workers must be at least 1, or left out",)),
        ("data.shards", 0, ("data.shards must be at least 1; got 0",)),
        ("optimizer.momentum", 1.0, ("optimizer.momentum must be in [0, 1)",)),
        ("optimizer.weight_decay", -1e-4, ("optimizer.weight_decay must not be negative",)),
        ("optimizer.nesterov", "no", ("optimizer.nesterov must be true or false",)),
    ],
)
def test_a_wrong_value(key, value, parts):
    one_of_us(lambda: load("cifar10-preact-resnet18-atas").with_values({key: value}), *parts)


def test_nesterov_needs_a_momentum():
    recipe = load("cifar10-preact-resnet18-atas")
    one_of_us(
        lambda: recipe.with_values({"optimizer.nesterov": True, "optimizer.momentum": 0}),
        "optimizer.nesterov needs optimizer.momentum above zero",
    )
    cycle = {"schedule.name": "cyclic", "schedule.peak_momentum": 0.8}
    assert recipe.with_values({"optimizer.nesterov": True, "optimizer.momentum": 0, **cycle}).optimizer.nesterov


def test_a_section_that_is_none(tmp_path):
    one_of_us(lambda: load(write(tmp_path, "a.toml", "training = 3\n")), "'training' in a recipe is a section")


def test_a_method_that_is_no_section(tmp_path):
    text = 'extends = "cifar10-preact-resnet18-atas"\nmethod = 3\n'
    one_of_us(lambda: load(write(tmp_path, "a.toml", text)), "'method' in a recipe is a section")


def test_a_file_that_is_no_recipe(tmp_path):
    one_of_us(lambda: load(write(tmp_path, "a.toml", "[training\nepochs = 3\n")), "is not valid TOML", "a.toml")


@pytest.mark.parametrize("content", ["", "# later\n", 'name = "mine"\n'])
def test_a_file_that_says_nothing(content, tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"mine\.toml is empty; extend another one, such as extends = "):
        recipes.load(path)


def test_load_refuses_what_is_neither_a_name_nor_a_path_nor_a_recipe():
    with pytest.raises(UsageError, match="by its name, its path or as a Recipe; got int"):
        recipes.load(5)


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "weights.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0\xf0\x9f\xff\xfe")
    one_of_us(lambda: load(tmp_path / "weights.safetensors"), "weights.safetensors")


def test_a_recipe_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        load("cifar10-preact-resnet18-atas").training.epochs = 3


def test_differences_name_the_keys_and_both_values():
    one = load("cifar10-preact-resnet18-atas")
    other = one.with_values({"training.seed": 4, "data.root": "x", "engine.device": "cpu", "method.eps": "4/255"})
    assert {line.split(":")[0] for line in fingerprint.differences(one, other)} == {
        "data.root",
        "method.eps",
        "training.seed",
        "engine.device",
    }
    assert len(fingerprint.differences(one, other, ignore=("engine", "data.root"))) == 2
    assert fingerprint.differences(one, one) == []


def test_of_the_engine_only_what_changes_the_training_tells_runs_apart():
    """Runs from before `sync_batchnorm` counted are found, as no recipe of theirs had it."""
    one = load("cifar10-preact-resnet18-atas")
    same = {"engine.kind": "eager", "engine.device": "cpu", "engine.precision": "bf16", "engine.deterministic": True}
    assert fingerprint.recipe_fingerprint(one.with_values(same)) == fingerprint.recipe_fingerprint(one)
    assert fingerprint.recipe_fingerprint(one) == "8984b018c9675100"
    assert fingerprint.recipe_fingerprint(
        one.with_values({"engine.sync_batchnorm": True})
    ) != fingerprint.recipe_fingerprint(one)
    keys = {f"engine.{field.name}" for field in dataclasses.fields(one.engine)}
    assert keys == {*same, "engine.sync_batchnorm"}, "decide whether a resume may change the new key"


@pytest.mark.parametrize(
    ("method", "values", "words"),
    [
        ("trades", {"consistency.weight": 1.0}, "leave it out with method trades"),
        ("ssat", {"consistency.weight": 1.0}, "leave it out with method ssat"),
        ("atas-plus", {"targets.smoothing": 0.2}, "method atas-plus has targets of its own: set method.smoothing"),
        ("atas-plus", {"targets.share": 0.2}, "method atas-plus has targets of its own: set method.smoothing"),
        ("atas-plus", {"targets.teacher_share": [0.7, 0.9]}, "method atas-plus has targets of its own"),
        ("liet", {"targets.smoothing": 0.2}, "method liet has targets of its own: set method.smoothing, and leave out"),
        ("tdat", {"targets.share": 0.2}, "method tdat has targets of its own: set method.label_factor, method.label_f"),
        ("fgsm-pco", {"targets.smoothing": 0.2}, "method fgsm-pco has targets of its own: set method.smoothing, and"),
        ("fgsm-pgi", {"targets.smoothing": 0.2}, "method fgsm-pgi has targets of its own: set method.smoothing, and"),
        ("fgsm-pgi", {"consistency.weight": 1.0}, "method fgsm-pgi has consistency of its own: set method.weight, and"),
        ("liet", {"consistency.weight": 1.0}, "method liet has consistency of its own: set method.weight, and leave"),
        ("fgsm-pgk", {"targets.smoothing": 0.2}, "method fgsm-pgk has targets of its own: set method.smoothing, and"),
        ("fgsm-pgk", {"consistency.weight": 1.0}, "method fgsm-pgk has consistency of its own: set method.weight, and"),
        ("fgsm-rs-cs", {"targets.smoothing": 0.2}, "method fgsm-rs-cs has targets of its own: set method.smoothing, a"),
        ("fgsm-mep-cs", {"consistency.weight": 1.0}, "method fgsm-mep-cs has consistency of its own: set method.weig"),
        ("fgsm-uap", {"targets.smoothing": 0.2}, "method fgsm-uap has targets of its own: set method.smoothing, and"),
        ("fgsm-uap", {"consistency.weight": 1.0}, "method fgsm-uap has consistency of its own: set method.weight, and"),
        ("gat", {"consistency.weight": 1.0}, "leave it out with method gat"),
        (
            "atas",
            {"targets.teacher_share": [0.7, 0.9]},
            r"teacher_share is the average of the weights; set training\.ema",
        ),
        ("atas", {"targets.teacher_share": [0.7, 0.9], "targets.share": 0.4}, "for a teacher; set one"),
        ("atas", {"targets.teacher_share": [0.7, 1.9]}, r"targets\.teacher_share must be in \[0, 1\]"),
        ("free", {"training.ema": 0.9, "training.ema_batchnorm": "re-estimate"}, "method free has no inputs"),
    ],
)
def test_parts_of_the_loss_that_a_method_lacks(method, values, words):
    with pytest.raises(UsageError, match=words):
        recipes.load("cifar10-preact-resnet18-atas").with_values({"method.name": method, **values})


def test_a_warm_up_that_never_ends():
    averaged = load("cifar10-preact-resnet18-atas").with_values({"training.ema": 0.9})
    one_of_us(
        lambda: averaged.with_values({"training.ema_warmup": 1.5}), "ema_warmup must be at least 2, or 0 for none"
    )
    assert averaged.with_values({"training.ema_warmup": 0}).training.ema_warmup == 0


def test_several_averages_keep_their_order():
    loaded = recipes.load("cifar10-preact-resnet18-atas").with_values({"training.ema": [0.999, 0.99]})
    assert loaded.training.ema_decays == (0.999, 0.99)
    assert recipes.from_dict(tomllib.loads(loaded.to_toml()), "again").training == loaded.training
    one = loaded.with_values({"training.ema": 0.999})
    assert (one.training.ema, one.training.ema_decays) == (0.999, (0.999,))
    assert recipes.load("cifar10-preact-resnet18-atas").training.ema_decays == ()


def test_sections_and_keys_of_later_versions_are_written_where_they_say_something():
    """Recipes of earlier versions stay what they were, to the letter."""
    loaded = load("cifar10-preact-resnet18-atas")
    for later in ("[targets]", "[consistency]", "final", "ema_"):
        assert later not in loaded.to_toml()
    softened = loaded.with_values({"targets.smoothing": 0.1})
    assert softened.targets.smoothing == 0.1
    assert from_dict(tomllib.loads(softened.to_toml()), "again").targets == softened.targets
    assert fingerprint.recipe_fingerprint(softened) != fingerprint.recipe_fingerprint(loaded)
    assert fingerprint.differences(loaded, softened)[0] == "targets.smoothing: None became 0.1"


def test_keys_of_a_weight_perturbation():
    keys = {"optimizer.perturb": "ascent", "optimizer.perturb_gamma": 0.02, "optimizer.perturb_from": 3}
    perturbation = load("cifar10-preact-resnet18-atas").with_values(keys).optimizer.weight_perturbation
    assert repr(perturbation) == "WeightPerturbation(gamma=0.02, form='ascent', from_epoch=3, depth_power=None)"
    keys |= {"optimizer.perturb_depth_power": 0.3}
    assert load("cifar10-preact-resnet18-atas").with_values(keys).optimizer.weight_perturbation.depth_power == 0.3
    with pytest.raises(UsageError, match=r"optimizer\.perturb_depth_power must be above 0; got 0"):
        load("cifar10-preact-resnet18-atas").with_values(keys | {"optimizer.perturb_depth_power": 0})


PERTURBED = {"optimizer.perturb": "ascent"}
AVERAGED = {"training.ema": 0.9}
SHIFTED = {"data.view": "cropshift"}
RESIZED = {"data.view": "resized", "method.grid": 8}


@pytest.mark.parametrize(
    ("key", "value", "needed", "enough"),
    [
        ("targets.noise", "random", "targets.smoothing", {"targets.smoothing": 0.2}),
        ("targets.decay", 0.9, "targets.share", {"targets.share": 0.2}),
        ("targets.from_epoch", 3, "targets.share", {"targets.share": 0.2}),
        ("targets.teacher_temperature", (1.5, 1), "targets.teacher_share", {"targets.teacher_share": (0.2, 0.3)}),
        ("consistency.distance", "logits", "consistency.weight", {"consistency.weight": 1.0}),
        ("consistency.ramp", 0.5, "consistency.weight", {"consistency.weight": 1.0}),
        ("consistency.through", "both", "consistency.weight", {"consistency.weight": 1.0}),
        ("optimizer.betas", (0.9, 0.99), "optimizer.name = adamw", {"optimizer.name": "adamw"}),
        ("optimizer.eps", 1e-6, "optimizer.name = adamw", {"optimizer.name": "adamw"}),
        ("optimizer.perturb_gamma", 0.1, "optimizer.perturb", PERTURBED),
        ("optimizer.perturb_from", 3, "optimizer.perturb", PERTURBED),
        ("optimizer.perturb_depth_power", 0.3, "optimizer.perturb", PERTURBED),
        ("schedule.final", 0.1, "schedule.name = cyclic or cosine", {"schedule.name": "cyclic"}),
        ("schedule.final", 0.1, "schedule.name = cyclic or cosine", {"schedule.name": "cosine"}),
        ("training.ema_warmup", 2, "training.ema", AVERAGED),
        ("training.ema_batchnorm", "average", "training.ema", AVERAGED),
        ("training.ema_batchnorm", "re-estimate", "training.ema", AVERAGED),
        ("data.shift", 3, "data.view = cropshift", SHIFTED),
        ("data.erase_area", (0.1, 0.2), "data.erase", {"data.erase": 0.5}),
        ("data.view_until", 0.5, "data.view = cropshift or data.erase", SHIFTED),
        ("data.view_size", 24, "data.view = crop or resized", RESIZED),
        ("data.view_scale", (0.1, 1), "data.view = resized", RESIZED | {"data.view_size": 24}),
    ],
)
def test_keys_that_have_no_effect(key, value, needed, enough):
    values = {"training.ema": 0.9} if key.startswith("targets.") else {}
    message = f"{key} has no effect without {needed}; set {needed}, or leave {key.split('.')[1]} out"
    recipe = load("cifar10-preact-resnet18-atas").with_values(values)
    with pytest.raises(UsageError, match=re.escape(message)):
        recipe.with_values({key: value})
    recipe.with_values({key: value, **enough})


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"optimizer.name": "adamw", "optimizer.momentum": 0.8}, "optimizer.momentum"),
        ({"optimizer.name": "adamw", "schedule.peak_momentum": 0.8}, "schedule.peak_momentum"),
        ({"schedule.name": "cyclic", "schedule.warmup": 0.1}, "schedule.warmup"),
        ({**RESIZED, "data.erase": 0.5}, "data.erase"),
    ],
)
def test_keys_that_lose_their_effect(values, key):
    with pytest.raises(UsageError, match=rf"{re.escape(key)} has no effect without"):
        load("cifar10-preact-resnet18-atas").with_values(values)
    load("cifar10-preact-resnet18-atas").with_values(values | {key: 0})


def test_zero_is_no_contradiction():
    nothing = {"targets.share": 0, "targets.from_epoch": 0, "consistency.ramp": 0, "schedule.final": 0, "data.shift": 0}
    load("cifar10-preact-resnet18-atas").with_values(nothing)
