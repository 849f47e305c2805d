"""The verdict: by the rule of the report, and never kinder than the evaluation."""

import re
from pathlib import Path

import pytest
import torch

from atas import Linf, recipes
from atas.autotrain.plan import TrainingPlan
from atas.autotrain.result import AutoTrainResult, Findings, trend
from atas.evaluation import Evaluation
from atas.evaluation.warnings import EvaluationWarning
from atas.training import Run

N = 200


def flags(count):
    return torch.arange(N) < count


def evaluation(clean=180, attacked=100, warnings=(), attack="autoattack", eps=0.1):
    correct = {"clean": flags(clean), "pgd50": flags(attacked + 5), attack: flags(attacked)}
    correct["worst"] = flags(attacked)
    nothing = dict.fromkeys(correct, 0.0)
    return Evaluation(
        Linf(eps),
        correct,
        nothing,
        {"attacks": {}, "seed": 0, "precision": "float32"},
        {},
        "weights",
        "data",
        warnings=tuple(EvaluationWarning(kind, kind) for kind in warnings),
    )


def verdict(result=None, metrics=None, events=(), epochs=50, model="small-cnn", data="digits", **findings):
    values = {"training.epochs": epochs, "model.name": model, "data.name": data, "method.eps": 0.1}
    recipe = recipes.from_dict({}, "auto").with_values({**values, **findings.pop("values", {})})
    plan = findings.pop("plan", TrainingPlan(epochs, 1.0, 5.0, 20.0, too_short=False, longest=False))
    rows = metrics or [{"epoch": epoch, "pgd10": 0.5} for epoch in range(epochs)]
    found = {"most_frequent": 0.12, "test_images": N, "held_out": None, **findings}
    result = result or evaluation()
    return Findings(recipe, Path("runs/x"), rows, events, result, plan=plan, **found).verdict()


def text(*arguments, **options):
    return "\n".join(verdict(*arguments, **options))


def test_the_worst_case_has_a_figure_an_interval_and_the_number_of_images():
    first = verdict()[0]
    assert first.startswith("Of 200 test images, the model classifies 90.0% correctly without an attack.")
    assert "The worst case is 50.0% (43.1 to 56.9% with 95% confidence)." in first
    assert "AutoAttack" in verdict()[1]


def test_without_autoattack_it_is_a_bound():
    shown = text(evaluation(attack="apgd-t"))
    assert "The worst case is at most 50.0%" in shown
    assert "AutoAttack was not run" in shown
    assert "atas evaluate runs/x --attacks pgd50,autoattack" in shown


def test_masked_gradients_make_it_unknown():
    shown = text(evaluation(warnings=["more-steps"]))
    assert "The worst case is not known." in shown
    assert "masked gradients" in shown
    assert "Warning: more-steps." in shown
    assert "The worst case is 50.0%" not in shown


def test_chance_is_no_accuracy():
    shown = text(evaluation(clean=22, attacked=22, warnings=["chance"]))
    assert shown.startswith("The model has learnt nothing")
    assert "It is not robust." in shown
    assert "worst case" not in shown
    assert "may be too large" in shown


def test_no_robustness():
    shown = text(evaluation(attacked=2))
    assert shown.startswith("The model is not robust: its worst case is 1.0%.")
    assert "eps = 0.1 may be too large for these images" in shown
    assert "eps = 0.05" in shown


def test_one_class_for_all_images_would_do_as_well():
    assert "Robustness is not shown" in text(most_frequent=0.45)
    assert "Robustness is not shown" not in text(most_frequent=0.42)


def test_grey_images():
    assert "uniformly grey" in text(values={"method.eps": 0.5})


@pytest.mark.parametrize(
    ("events", "last", "expected"),
    [
        ([], True, "collapsed in epoch 8: the model withstands the attack that it was trained with"),
        ([{"event": "rollback"}], False, "returned to the last healthy weights once"),
        ([{"event": "rollback"}] * 2, False, "returned to the last healthy weights 2 times"),
        ([{"event": "rollback"}, {"event": "stop"}], True, "ended with the last healthy weights"),
    ],
)
def test_collapse(events, last, expected):
    rows = [{"epoch": epoch, "pgd10": 0.5, "collapsed": epoch == 7} for epoch in range(50)]
    rows[-1]["collapsed"] = last
    shown = text(metrics=rows, events=events)
    assert expected in shown
    assert ("Do not use it" in shown) == (not events)


def test_breakdown():
    assert "broke down" in text(events=[{"event": "breakdown"}])


def test_held_out_images():
    shown = text(held_out=20)
    assert "The data had no test images: 20 of its training images were held out" in shown
    assert "your model" not in shown.lower()
    shown = text(held_out=20, before=evaluation(190, 10), after=evaluation(180, 100))
    assert "If your model was trained on these images before, all figures are higher than on new ones." in shown


@pytest.mark.parametrize(
    ("accuracies", "expected"),
    [
        ([0.3] * 40 + [0.4] * 10, "likely to help: PGD-10 accuracy on held-back training images still rose by 10.0"),
        ([0.5] * 40 + [0.4] * 10, "unlikely to help: PGD-10 accuracy on held-back training images fell by 10.0"),
        ([0.5] * 50, "would change little"),
    ],
)
def test_more_minutes(accuracies, expected):
    assert expected in text(metrics=[{"epoch": epoch, "pgd10": value} for epoch, value in enumerate(accuracies)])


def test_few_epochs_call_for_more_minutes():
    assert "likely to help: 12 epochs are few. 30 epochs and an evaluation take about a minute" in text(epochs=12)
    short = TrainingPlan(3, 60.0, 60.0, 100.0, too_short=True, longest=False)
    assert "the time was too short for this data. 30 epochs and an evaluation take about 52 minutes" in text(
        epochs=3, plan=short
    )


def test_the_most_epochs_call_for_none():
    plan = TrainingPlan(300, 1.0, 5.0, 20.0, too_short=False, longest=True)
    assert "unlikely to help: 300 epochs are the most" in text(epochs=300, plan=plan)


def test_objects_of_python_have_no_command():
    shown = text(evaluation(attack="apgd-t"), data="given:arrays")
    assert "atas evaluate" not in shown
    assert "atas.evaluate with all test images" in shown


def test_the_gain_over_a_given_model_says_what_it_cost():
    shown = text(before=evaluation(190, 10), after=evaluation(180, 100))
    assert "Your model had 5.0% under PGD-10 and 95.0% clean; the trained one has 50.0% and 90.0%" in shown


def test_trend_needs_probes():
    assert trend([{"pgd10": 0.1}] * 9) is None
    assert trend([{"epoch": 1}] * 50) is None


def test_the_result_is_its_verdict():
    recipe = recipes.from_dict({}, "auto")
    model = torch.nn.Linear(2, 2)
    result = AutoTrainResult(Run(Path("x"), recipe, model, []), evaluation(), ("One.", "Two."), ("data: x",))
    assert str(result) == "One.\nTwo."
    assert result.model is model
    assert re.match(r"AutoTrainResult\(run=", repr(result))
