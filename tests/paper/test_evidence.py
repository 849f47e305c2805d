"""Studies for evidence that is not run yet: their full plans, and their quick forms."""

import json

import pytest

from atas.paper.studies import get
from atas.paper.study import StudyOptions

CIFAR_BUDGETS = (8, 12, 16)


def trials_of(name, **options):
    return get(name).trials(StudyOptions(None, **options))


@pytest.mark.slow
def test_atta_with_one_larger_step_beside_atas():
    trials = trials_of("table-atta-steps", networks=("preact-resnet18",), seeds=(0, 1, 2))
    assert len(trials) == 3 * 3 * 5
    for eps in CIFAR_BUDGETS:
        own = [trial for trial in trials if round(255 * trial.resolved_recipe.method.eps) == eps and trial.seed == 2]
        methods = [trial.resolved_recipe.method for trial in own]
        assert [method.name for method in methods] == ["atas", *["atta"] * 4]
        assert [round(255 * method.settings["step_size"]) for method in methods[1:]] == [4, 8, 10, 12]
    assert {trial.attacks for trial in trials} == {("pgd10", "pgd50", "autoattack")}
    table = {trial.key for trial in trials_of("table-cifar10", methods=("atas", "atta"), seeds=(0, 1, 2))}
    assert len(table & {trial.key for trial in trials}) == 18  # ATAS and ATTA as they are


@pytest.mark.slow
def test_tiny_imagenet_with_and_without_low_resolution():
    trials = trials_of("table-tiny-imagenet")
    found = [
        (r.model.name, round(255 * r.method.eps), r.method.name, r.method.settings.get("grid"))
        for r in (trial.resolved_recipe for trial in trials)
    ]
    memories = [("fgsm-rs", None), ("atta", None), ("atas", None), ("atas", 32), ("atas", 16)]
    networks = ("preact-resnet18", "resnet18")
    assert found == [(net, eps, *memory) for eps in (4, 8) for net in networks for memory in memories]
    assert {trial.resolved_recipe.data.name for trial in trials} == {"tiny-imagenet"}
    (extra,) = trials_of("table-tiny-imagenet", methods=("atta-grid16",), networks=("resnet18",), eps=(4 / 255,))
    assert extra.resolved_recipe.method.settings["grid"] == 16
    assert len({trial.key for trial in trials}) == 20


def test_constants_on_tiny_imagenet_are_judged_on_held_out_images():
    trials = trials_of("tiny-imagenet-steps", eps=(8 / 255,))
    assert len(trials) == 6
    assert {(trial.held_out, trial.attacks) for trial in trials} == {(5000, ("pgd10",))}
    assert all(trial.resolved_recipe.method.settings["clip"] is None for trial in trials)
    steps = {round(255 * trial.resolved_recipe.method.settings["max_step"]) for trial in trials}
    assert steps == {16, 24}
    assert {trial.resolved_recipe.method.settings["c"] for trial in trials} == {0.32, 1.28, 5.12}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows", "options"),
    [
        ("table-atta-steps", 1, ["--attacks", "fgsm", "--methods", "atta-step8"]),
        ("table-tiny-imagenet", 2, ["--attacks", "fgsm", "--methods", "atas-grid32,atas-grid16"]),
        ("tiny-imagenet-steps", 6, []),
    ],
)
def test_the_quick_forms_run(name, rows, options, command, tmp_path):
    short = ("training.epochs=1", "training.batch_size=1297", "training.probe=20", "engine.device=cpu")
    sets = [part for value in short for part in ("--set", value)]
    status, _, err = command("reproduce", name, "--quick", "--examples", 5, *options, *sets, "--out", tmp_path)
    assert status == 0, err
    content = json.loads((tmp_path / f"{name}-quick.json").read_text())
    assert len(content["rows"]) == rows
    assert all(row["runs"] for row in content["rows"])
