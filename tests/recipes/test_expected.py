"""The table `[expected]`: read, put into words, compared with a result, and kept out of what is trained."""

import runpy
from pathlib import Path

import pytest

from atas import recipes
from atas.recipes.expected import Expected, ExpectedAccuracy, find_expected


def test_figures_of_the_demo():
    expected = find_expected(recipes.load("digits-small-cnn-atas"))
    assert expected.figure("clean") == "94.1 (92.4 to 95.2)"
    assert expected.figure("pgd50") == "62.5 (44.0 to 75.0)"
    assert expected.figure("autoattack") == "3.2"
    assert expected.figure("pgd10") is None
    assert expected.differences == ()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "cifar10-preact-resnet18-fgsm-rs-eps12",
            "Expect, on the 10,000 test images, with seed 0 in percent: clean 80.98, PGD-10 0.00, PGD-50 0.00, "
            "AutoAttack 0.00 (NVIDIA H200). It collapsed.",
        ),
        (
            "digits-small-cnn-atas",
            "Expect, on the 500 test images, mean and range over seeds 5 to 19 in percent: clean 94.1 (92.4 to 95.2), "
            "FGSM 75.3 (70.4 to 78.8), PGD-50 62.5 (44.0 to 75.0). AutoAttack, seed 0: 3.2. The budget is too large "
            "for real robustness; it was chosen to show the collapse of FGSM-RS.",
        ),
    ],
)
def test_sentence(name, sentence):
    assert find_expected(recipes.load(name)).sentence == sentence


def test_differences_name_the_keys_that_a_run_changed():
    changed = recipes.load("digits-small-cnn-atas").with_values({"training.epochs": 3, "training.seed": 7})
    assert find_expected(changed).differences == ("training.epochs: 80 became 3",)


def test_find_expected_returns_none_for_a_run_on_a_subset():
    atas = recipes.load("digits-small-cnn-atas")
    assert find_expected(atas) is not None
    assert find_expected(atas, on_subset=True) is None


@pytest.mark.parametrize("name", ["cifar100-preact-resnet18-atas", "imagenet-resnet18-atas"])
def test_recipes_without_a_table_expect_nothing(name):
    assert find_expected(recipes.load(name)) is None


def test_recipes_of_the_user_expect_nothing():
    assert find_expected(recipes.from_dict({}, "mine")) is None


def test_the_table_is_no_part_of_the_recipe(tmp_path):
    """Neither what it holds nor that it is there changes the fingerprint; a recipe that extends this one has none."""
    path, child = tmp_path / "mine.toml", tmp_path / "child.toml"
    path.write_text('[training]\nepochs = 3\n\n[expected]\nexamples = 5\nanything = "at all"\n', encoding="utf-8")
    child.write_text('extends = "mine.toml"\n', encoding="utf-8")
    plain = recipes.from_dict({"training": {"epochs": 3}}, "mine")
    assert recipes.load(path) == plain
    assert recipes.recipe_fingerprint(recipes.load(child)) == recipes.recipe_fingerprint(plain)
    assert "expected" not in recipes.load(path).to_toml()
    assert find_expected(recipes.load("cifar10-preact-resnet18-atas-literal")).seeds == (0,)  # its parent has three


def test_tables_agree_with_the_records():
    """After new results: python scripts/expected.py."""
    updated = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "expected.py"))["updated_recipes"]()
    assert updated
    for path, content in updated.items():
        assert path.read_text(encoding="utf-8") == content


def make_expected(**ranges):
    """Accuracies on 10,000 images: a number for one seed, or mean, smallest and largest."""
    accuracy = {"clean": (81.5, 81.2, 81.8), **ranges}
    return Expected("r", 10_000, (0, 1, 2), {name: ExpectedAccuracy(*values) for name, values in accuracy.items()})


@pytest.mark.parametrize(
    ("expected", "percent", "far"),
    [
        (make_expected(pgd50=(47.4, 47.1, 47.7)), {"clean": 70, "pgd50": 45.5, "fgsm": 9}, None),
        (make_expected(pgd50=(47.4, 47.1, 47.7)), {"clean": 81, "pgd50": 45.3}, "PGD-50 -2.1"),
        (make_expected(pgd10=(60, 50, 70), pgd50=(47,)), {"clean": 81, "pgd10": 41, "pgd50": 9}, None),
        (make_expected(pgd10=(60, 50, 70), pgd50=(47,)), {"clean": 81, "pgd10": 81}, "PGD-10 +21.0"),
    ],
)
def test_a_result_is_compared_by_the_range_over_seeds(expected, percent, far):
    """The range of a single seed is not known, and clean accuracy after a collapse may be any."""
    line, *notes = expected.compare(10_000, {name: value / 100 for name, value in percent.items()})
    assert line == f"the recipe says: {expected.sentence}"
    assert notes == ([f"note: this run is far from that ({far} points); look for what differs"] if far else [])


def test_another_training_or_fewer_images_are_not_compared():
    expected, accuracy = make_expected(pgd50=(47.4, 47.1, 47.7)), {"clean": 0.09, "pgd50": 0.09}
    changed = Expected("r", 10_000, (0,), expected.accuracy, differences=("training.epochs: 80 became 3",))
    assert changed.compare(10_000, accuracy) == []
    assert expected.compare(1000, accuracy) == []
