"""The three answers at the top: they must not promise more than was measured."""

import dataclasses

import pytest

from atas.evaluation import EvaluationWarning
from atas.evaluation.warnings import MASKED_GRADIENTS
from atas.recipes.expected import Expected, ExpectedAccuracy
from atas.report.headline import run_answers


@pytest.fixture
def told(make_run, view_of):
    """The answers for a run whose evaluation found so many of 100 examples right."""

    def tell(name="run", warnings=(), foreseen=None, **right):
        options = {key: right.pop(key) for key in ("curve", "collapsed_from") if key in right}
        view = view_of(make_run(name, right=right or None, **options))
        if warnings:
            found = dataclasses.replace(view.evaluation, warnings=tuple(warnings))
            view.summary = dataclasses.replace(view.summary, evaluation=found)
        return run_answers(view, foreseen)

    return tell


def test_a_robust_model(told):
    robust, sure, trust = told(clean=90, pgd50=60, autoattack=55)
    assert (robust.word, robust.tone) == ("In part: 55.0%", "plain")
    assert (
        "about 90 correctly, and about 55 in the worst case: under every attack by PGD-50 and AutoAttack" in robust.why
    )
    assert "every pixel by at most 8/255" in robust.why
    assert sure.word == "To 9.8 points"
    assert "points: 45.2 to 64.4% with 95% confidence" in sure.why
    assert "seed 0" in sure.why
    assert (trust.word, trust.tone) == ("Yes, as far as is known", "good")


def test_a_model_that_is_not_robust(told):
    robust, _, _ = told(clean=90, autoattack=0)
    assert (robust.word, robust.tone) == ("No: 0.0%", "bad")
    assert told("most", clean=95, autoattack=91)[0].word == "Yes: 91.0%"
    assert told("poor", clean=30, autoattack=30)[0].word == "In part: 30.0%"


@pytest.mark.parametrize(
    ("right", "n", "robust", "sure"),
    [
        (0, 100, ("No: 0.0%", "bad"), "care"),
        (1, 100, ("In part: 1.0%", "plain"), "care"),  # may be 5% and more
        (89, 100, ("In part: 89.0%", "plain"), "care"),
        (90, 100, ("Yes: 90.0%", "good"), "care"),
        (42, 1000, ("In part: 4.2%", "plain"), "good"),  # at most 5.6%
        (35, 1000, ("No: 3.5%", "bad"), "good"),  # at most 4.8%
        (899, 1000, ("In part: 89.9%", "plain"), "good"),
        (500, 1000, ("In part: 50.0%", "plain"), "care"),  # to 3.1 points
        (550, 1100, ("In part: 50.0%", "plain"), "good"),  # to 2.9 points
    ],
)
def test_words_and_tones_change_at_these_figures(make_run, add_result, view_of, right, n, robust, sure):
    folder = make_run("run")
    add_result(folder, "evaluation.json", n=n, clean=n, autoattack=right)
    found = run_answers(view_of(folder), None)
    assert [(found[0].word, found[0].tone), found[1].tone] == [robust, sure]


def test_a_collapse_is_no_whatever_the_figure(told):
    robust, _, _ = told(clean=90, fgsm=95, curve=[(0.5, 0.4, 0.3), (0.8, 0.9, 0.0)], collapsed_from=1)
    assert robust.word.startswith("No")
    assert "collapsed in epoch 2" in robust.why


def test_without_autoattack_the_figure_is_a_bound(told):
    robust, _, _ = told(clean=90, pgd50=60)
    assert (robust.word, robust.tone) == ("At most 60.0%", "care")
    assert "AutoAttack was not run" in robust.why
    assert told("best", clean=99, pgd50=95)[0].word == "At most 95.0%"
    assert told("none", clean=90, pgd50=0)[0].word == "No: at most 0.0%", "an upper bound is enough for that"


@pytest.mark.parametrize("kind", MASKED_GRADIENTS)
def test_with_signs_of_masked_gradients_it_is_not_known(told, kind):
    sign = EvaluationWarning(kind, "the gradients mislead")
    robust, _, _ = told(clean=90, pgd50=60, autoattack=55, warnings=[sign])
    assert (robust.word, robust.tone) == ("Not known", "care")
    assert f"signs of masked gradients (warnings: {kind})" in robust.why
    assert "at most 55.0%, probably lower" in robust.why
    assert told("low", clean=90, autoattack=0, warnings=[sign])[0].word == "No: 0.0%"


def test_other_warnings_do_not_hide_the_figure(told):
    assert (
        told(clean=90, autoattack=55, warnings=[EvaluationWarning("softmax", "no logits")])[0].word == "In part: 55.0%"
    )


def test_without_autoattack_the_trust_is_partial(told):
    _, _, trust = told(clean=90, pgd50=60)
    assert (trust.word, trust.tone) == ("In part", "care")
    assert "upper bound" in trust.why


def test_warnings_come_before_praise(told):
    warnings = [EvaluationWarning("square", "Square breaks more"), EvaluationWarning("random", "answers change")]
    _, _, trust = told(clean=90, autoattack=60, warnings=warnings)
    assert (trust.word, trust.tone) == ("With care", "care")
    assert "2 warnings: Square breaks more." in trust.why


def test_autoattack_in_another_result_is_not_overlooked(make_run, add_result, view_of):
    folder = make_run("run", right={"clean": 90, "pgd50": 60})
    add_result(folder, "autoattack.json", n=50, clean=50, autoattack=29)
    robust, _, trust = run_answers(view_of(folder), None)
    assert robust.word == "At most 60.0%"
    assert trust.word == "In part"
    assert "on 50 images: its worst case is 58.0% (44.2 to 70.6%)" in trust.why


def test_autoattack_that_shows_the_figure_to_be_wrong_takes_its_place(make_run, add_result, view_of):
    folder = make_run("run", right={"clean": 90, "pgd50": 60})
    warning = EvaluationWarning("square", "Square breaks more")
    add_result(folder, "evaluation-50.json", n=50, warnings=(warning,), clean=50, autoattack=3)
    robust, _, trust = run_answers(view_of(folder), None)
    assert robust.word == "Not known"
    assert "at most 6.0%" in robust.why
    assert (trust.word, trust.why) == ("With care", "1 warning: Square breaks more.")


@pytest.mark.parametrize("other", [{"weights": "others"}, {"eps": 4 / 255}, {"clean": 49}])
def test_results_of_other_weights_budgets_and_images_are_left_out(make_run, add_result, view_of, other):
    folder = make_run("run", right={"clean": 90, "pgd50": 60})
    add_result(folder, "autoattack.json", n=50, autoattack=3, **{"clean": 50, **other})
    (folder / "notes.json").write_text('{"format": "of somebody else"}')
    robust, _, trust = run_answers(view_of(folder), None)
    assert robust.word == "At most 60.0%"
    assert "AutoAttack was not run" in trust.why


def test_other_weights_come_before_all(copy_of, view_of, edit_evaluation):
    folder = copy_of()
    edit_evaluation(folder, weights="others")
    _, _, trust = run_answers(view_of(folder), None)
    assert (trust.word, trust.tone) == ("No", "bad")


def test_without_evaluation(told):
    robust, sure, trust = told()
    assert (robust.word, sure.word, trust.word) == ("Not known", "Not at all", "Not evaluated")
    assert "70.0% clean and 40.0% under PGD-10" in robust.why
    assert "atas evaluate" in trust.why
    assert told("collapsed", curve=[(0.8, 0.9, 0.0)], collapsed_from=0)[0].word == "No"


def test_clean_images_alone_say_nothing_of_robustness(told):
    assert told(clean=90)[0].word == "Not known"


# What was expected


def test_the_range_over_seeds_is_told(told):
    foreseen = Expected("r", 100, (0, 1), {"pgd50": ExpectedAccuracy(59.7, 44.0, 69.0)})
    _, sure, _ = told(clean=90, pgd50=60, foreseen=foreseen)
    assert "59.7 (44.0 to 69.0)" in sure.why
