"""What recipes gave where they were run, and what is told of a run beside it."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

from atas.reproduce import expected as module
from atas.reproduce.expected import Expected, expected
from atas.reproduce.figures import Figure
from atas.training.recipe import load

HERE = Path(__file__).parents[2]
ATAS = load("cifar10-preact-resnet18-atas")


def result(data="0123", **percent):
    """Of an evaluation, what matters here."""
    return SimpleNamespace(data=data, correct=percent, accuracy={name: value / 100 for name, value in percent.items()})


@pytest.fixture
def known():
    """Makes figures of one seed or several."""

    def make(seeds=(0,), collapsed=0, **percent):
        spread = 0.3 if len(seeds) > 1 else 1.0
        figures = {
            name: Figure(value, value - spread, value + spread, len(seeds), 10_000) for name, value in percent.items()
        }
        return Expected("mine", "0123", seeds, collapsed, ("a GPU",), figures)

    return make


def test_the_file_is_what_the_records_give():
    """After new results: python scripts/expected.py."""
    made = runpy.run_path(str(HERE / "scripts" / "expected.py"))["made"]()
    assert Path(module.__file__).with_name(module.FILE).read_text(encoding="utf-8") == made


def test_figures_are_of_the_recipe_as_it_stands():
    found = expected(ATAS)
    assert (found.recipe, found.seeds) == ("cifar10-preact-resnet18-atas", (0, 1, 2))
    assert set(found.figures) == {"clean", "pgd10", "pgd50", "autoattack"}
    assert 40 < found.figures["autoattack"].low < found.figures["autoattack"].high < 50
    elsewhere = {"training.seed": 7, "engine.device": "cpu", "data.root": "there", "evaluation.attacks": ["fgsm"]}
    assert expected(ATAS.with_values(elsewhere)) == found
    for key, value in (("training.epochs", 29), ("method.eps", "7/255"), ("engine.precision", "float32")):
        assert expected(ATAS.with_values({key: value})) is None


def test_a_run_is_held_against_them(known):
    (said,) = known((0, 1, 2), clean=81.5, pgd50=47.4, autoattack=44).beside(result(clean=80, pgd50=46, fgsm=55))
    assert said == (
        "for comparison: this recipe gave clean 81.50 (81.20 to 81.80), PGD-50 47.40 (47.10 to 47.70); "
        "mean and range over 3 seeds, a GPU"
    )
    (said,) = known(clean=81.5, pgd50=47.4).beside(result(clean=81, pgd50=47))
    assert said == "for comparison: this recipe gave clean 81.50, PGD-50 47.40; one run, a GPU"


def test_what_is_far_from_them_is_noted(known):
    _, note = known(clean=81.5, pgd10=50, pgd50=47.4).beside(result(clean=81, pgd10=47.9, pgd50=49.5))
    assert "(PGD-10 -2.1, PGD-50 +2.1 points)" in note
    wide = Expected(
        "mine",
        "0123",
        (0, 1),
        0,
        ("a GPU",),
        {"clean": Figure(90, 89, 91, 2, 500), "pgd50": Figure(60, 50, 70, 2, 500)},
    )
    assert len(wide.beside(result(clean=90, pgd50=41))) == 1
    assert len(wide.beside(result(clean=90, pgd50=39))) == 2


def test_a_collapse_ends_anywhere(known):
    (said,) = known((0, 1), collapsed=2, clean=80, pgd50=0).beside(result(clean=70, pgd50=0))
    assert said.endswith("; mean and range over 2 seeds, 2 of which collapsed, a GPU")


@pytest.mark.parametrize("other", [result("4567", clean=81, pgd50=47), result(clean=81), result(clean=81, fgsm=60)])
def test_other_images_and_other_attacks_are_not_compared(known, other):
    assert known(clean=81.5, pgd50=47.4).beside(other) == []


def test_a_recipe_that_was_not_attacked_has_none(fill, tiny, store):
    fill(tiny(), {"clean": 30}, n=40)
    assert Expected.of("tiny", [store.record(tiny())]) is None
    fill(tiny(), {"clean": 30, "fgsm": 20}, n=40)
    fill(tiny(seed=1), {"clean": 32}, n=40)
    found = Expected.of("tiny", [store.record(tiny()), store.record(tiny(seed=1))])
    assert (found.seeds, found.figures["clean"].value, found.figures["fgsm"].value) == ((0,), 75, 50)
