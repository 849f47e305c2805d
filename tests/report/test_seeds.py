"""The page of several seeds: it must promise no more than the pages of its runs."""

import pytest

from atas.evaluation import EvaluationWarning
from atas.report.sections.seeds import seeds_section
from atas.report.seed_groups import summarise_groups


@pytest.fixture
def told(make_run, add_result, view_of, tmp_path):
    """The answers and the cell of the worst case for two seeds that have so many of 100 images right."""

    def tell(warnings=(), **right):
        for seed in (0, 1):
            folder = make_run(f"group/seed-{seed}")
            recipe = folder / "recipe.toml"
            recipe.write_text(recipe.read_text().replace("seed = 0", f"seed = {seed}"))
            add_result(folder, "evaluation.json", n=100, warnings=warnings, **right)
        (group,) = summarise_groups([tmp_path / "group"])
        views = [view_of(tmp_path / "group" / f"seed-{seed}") for seed in (0, 1)]
        page = seeds_section([group], views).context
        return page["answers"][0], next(iter(page["runs"].rows))[-3]

    return tell


def test_autoattack_measures_the_worst_case(told):
    robust, cell = told(clean=90, autoattack=50)
    assert (robust.word, cell.text) == ("50.0%", "50.0")


def test_without_autoattack_it_is_a_bound(told):
    robust, cell = told(clean=90, pgd50=60)
    assert (robust.word, robust.tone, cell.text) == ("At most 60.0%", "care", "at most 60.0")


def test_with_masked_gradients_it_is_not_known(told):
    robust, cell = told(clean=90, autoattack=50, warnings=[EvaluationWarning("zero-gradients", "half of them")])
    assert (robust.word, robust.tone) == ("Not known", "care")
    assert (cell.text, cell.note) == ("not known", "at most 50.0%")


def test_none_is_said(told):
    robust, _ = told(clean=90, pgd50=1)
    assert (robust.word, robust.tone) == ("No: at most 1.0%", "bad")


def test_results_on_fewer_images_say_so(make_run, add_result, view_of, tmp_path):
    for seed in (0, 1):
        folder = make_run(f"group/seed-{seed}")
        recipe = folder / "recipe.toml"
        recipe.write_text(recipe.read_text().replace("seed = 0", f"seed = {seed}"))
        add_result(folder, "evaluation.json", n=100, clean=90, pgd50=50)
        add_result(folder, "evaluation-50.json", n=50, clean=50, pgd10=30)
    (group,) = summarise_groups([tmp_path / "group"])
    views = [view_of(tmp_path / "group" / f"seed-{seed}") for seed in (0, 1)]
    table = seeds_section([group], views).context["runs"]
    notes = {title: cell.note for title, cell in zip(table.head, next(iter(table.cells)), strict=True)}
    assert notes["PGD-50"] == "50.0 to 50.0"
    assert notes["PGD-10"] == "60.0 to 60.0 of 50"
