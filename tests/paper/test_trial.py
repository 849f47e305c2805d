"""Keys: stable, the same for what comes to the same, and distinct for everything else."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from atas.errors import UsageError
from atas.sweeps import Trial

BASE = Trial("cifar10-preact-resnet18-atas")
RESULTS = Path(__file__).parents[2] / "results"


def test_keys_do_not_change():
    """If this fails, results that people have are not found any more: let it be for a reason."""
    assert (BASE.key, BASE.training_key, BASE.row) == ("551447a0967c1552", "0b6e5470271550f9", "dbe5f8d0021db13d")


@pytest.mark.slow
def test_keys_are_the_same_in_another_process():
    code = "from atas.sweeps import Trial; print(Trial('cifar10-preact-resnet18-atas').key)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == BASE.key


@pytest.mark.parametrize(
    "values",
    [
        {"method.c": 1.28, "method.max_step": "16/255"},
        {"method.max_step": 16 / 255, "method.c": 1.28},
        {"method.clip": ["4/255", "14/255"]},
        {"data.root": "/elsewhere", "engine.device": "cpu", "engine.kind": "eager"},
        {"evaluation.attacks": ["fgsm"], "training.checkpoint_every": 5},
        {"method.grid": "none", "method.store": "host"},
    ],
)
def test_equivalent_trials_have_the_same_key(values):
    trial = Trial("cifar10-preact-resnet18-atas", values)
    assert (trial.key, trial.row, trial.training_key) == (BASE.key, BASE.row, BASE.training_key)


def test_a_recipe_that_leaves_a_default_out_comes_to_the_same(tmp_path):
    from atas import recipes

    document = recipes.load(BASE.recipe).to_dict()
    for name in ("c", "beta", "warmup_epochs", "reset_every"):
        del document["method"][name]
    path = tmp_path / "short.toml"
    path.write_text(recipes.from_dict(document, "short").to_toml())
    assert "warmup_epochs" not in path.read_text()
    assert Trial(str(path)).key == BASE.key


def test_attacks_are_not_part_of_a_key():
    assert Trial(BASE.recipe, attacks=("pgd10",)).key == BASE.key


OTHERS = [
    {"seed": 1},
    {"padding": 4},
    {"examples": 1000},
    {"held_out": 5000},
    {"recipe": "cifar10-preact-resnet18-atas-eps12"},
    {"recipe": "cifar100-preact-resnet18-atas"},
    {"recipe": "cifar10-wrn-28-10-atas"},
    {"recipe": "cifar10-preact-resnet18-atas-literal"},
    {"values": {"method.clip": "none"}},
    {"values": {"method.c": 0.64}},
    {"values": {"training.epochs": 29}},
    {"values": {"schedule.name": "cyclic"}},
    {"values": {"data.pad": 0}},
    {"values": {"engine.precision": "float32"}},
]


def test_different_trials_have_different_keys():
    trials = [BASE, *(Trial(**({"recipe": BASE.recipe} | other)) for other in OTHERS)]
    assert len({trial.key for trial in trials}) == len(trials)


def test_only_what_changes_the_weights_is_in_the_training_key():
    for change in ({"padding": 4}, {"examples": 1000}, {"attacks": ("fgsm",)}):
        assert Trial(BASE.recipe, **change).training_key == BASE.training_key
    for change in ({"seed": 1}, {"held_out": 5000}, {"values": {"method.c": 0.64}}):
        assert Trial(BASE.recipe, **change).training_key != BASE.training_key


def test_an_explicit_precision_is_part_of_the_keys_and_auto_is_not():
    """A reproduction in float32 is another trial than one in the device's own precision."""
    keys = {
        precision: Trial(BASE.recipe, {"engine.precision": precision}).training_key
        for precision in ("auto", "bf16", "float32")
    }
    assert keys["auto"] == BASE.training_key
    assert len(set(keys.values())) == 3
    assert Trial(BASE.recipe, {"engine.device": "cpu", "engine.kind": "eager"}).training_key == BASE.training_key


@pytest.mark.slow
def test_settings_that_came_later_leave_the_keys_of_older_records():
    """The records of results/ are found, and other values of the later settings are other trials."""
    records = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("cifar10*/runs/*.json"))]
    checked = [record for record in records if record["trial"].get("part") is None]
    assert len(checked) > 60
    for record in checked:
        values = record["trial"]
        trial = Trial(
            values["recipe"],
            values["values"],
            record["seed"],
            (),
            *map(values.get, ("padding", "examples", "held_out")),
        )
        assert (trial.key, trial.training_key, trial.row) == (record["key"], record["training_key"], record["row"])
    for recipe, key, value in (
        ("cifar10-preact-resnet18-pgd", "method.attack_mode", "eval"),
        ("cifar10-preact-resnet18-atta", "method.attack_mode", "train"),
        ("cifar10-preact-resnet18-atas", "method.write_back", False),
        ("cifar10-preact-resnet18-free", "method.clamp", "inputs"),
    ):
        assert Trial(recipe, {key: value}).training_key != Trial(recipe).training_key


def test_a_row_is_of_all_seeds():
    assert Trial(BASE.recipe, seed=7).row == BASE.row
    assert Trial(BASE.recipe, seed=7, padding=4).row != BASE.row


def test_labels_are_for_people():
    assert BASE.label == "cifar10, preact-resnet18, atas, 8/255, seed 0"
    other = Trial(BASE.recipe, {"method.clip": "none", "method.max_step": 12 / 255, "data.root": "x"}, 3, padding=4)
    assert other.label == ("cifar10, preact-resnet18, atas, 8/255, clip none, max_step 12/255, seed 3, padded by 4")


@pytest.mark.parametrize("change", [{"padding": -1}, {"examples": 0}, {"held_out": -1}])
def test_nonsense_is_refused(change):
    with pytest.raises(UsageError, match="must be at least"):
        Trial(BASE.recipe, **change)
