"""The model card says what is known, and plainly what is not."""

import dataclasses
import json

import pytest
import torch
from helpers.run_files import metric_rows

import atas
from atas import report
from atas.evaluation import EvaluationWarning
from atas.export.base import ExportSource, FormatOutput
from atas.export.model_card import render_card

WRITTEN = FormatOutput((), "load it so")


def text_of(folder):
    return render_card(ExportSource.load(folder), WRITTEN)


def sections_of(text):
    return {part.partition("\n")[0]: part.partition("\n")[2] for part in text.split("\n## ")[1:]}


def test_the_card_of_an_evaluated_run(evaluated):
    result = atas.Evaluation.load(evaluated / "evaluation.json")
    text = text_of(evaluated)
    found = sections_of(text)
    titles = ("Intended use", "Data", "Threat model", "Results", "Limits", "Training", "How to load")
    assert tuple(found) == titles
    assert "Linf(0.1)" in found["Threat model"]
    assert "1 x 8 x 8 pixels" in found["Intended use"]
    assert "`digits`" in found["Data"]
    low, high = (f"{100 * end:.2f}%" for end in result.interval["pgd10"])
    assert f"| pgd10 | {100 * result.accuracy['pgd10']:.2f}% | {low} to {high} |" in found["Results"]
    assert result.sentence() in found["Results"]
    assert "steps 10" in found["Results"]
    assert "not evaluated with AutoAttack" in found["Limits"]
    assert "alone. Other norms" in found["Limits"]
    settings = atas.Run.load(evaluated).recipe
    assert settings.to_toml().strip() in found["Training"]
    assert atas.recipes.recipe_fingerprint(settings) in found["Training"]
    assert json.loads((evaluated / "environment.json").read_text())["device"] in found["Training"]
    assert "s in training steps" in found["Training"]
    assert "load it so" in found["How to load"]


def test_not_evaluated_is_said_plainly(copy_of):
    folder = copy_of()
    (folder / "evaluation.json").unlink()
    found = sections_of(text_of(folder))
    assert "**Not evaluated.**" in found["Results"]
    assert "It was not evaluated against Linf(0.1)." in found["Limits"]
    assert "%" not in found["Results"]


def test_an_evaluation_of_other_weights_is_not_this_models(copy_of):
    folder = copy_of()
    result = atas.Evaluation.load(folder / "evaluation.json")
    dataclasses.replace(result, weights="0" * 16).save(folder / "evaluation.json")
    assert "**Not evaluated.**" in text_of(folder)


def test_warnings_and_autoattack(copy_of, with_autoattack):
    folder = copy_of()
    with_autoattack(folder)
    found = sections_of(text_of(folder))
    assert "- the gradients are masked" in found["Results"]
    assert "The evaluation has warnings" in found["Limits"]
    assert "not evaluated with AutoAttack" not in found["Limits"]


def test_all_evaluations_are_told_the_runs_own_first(copy_of):
    folder = copy_of()
    result = atas.Evaluation.load(folder / "evaluation.json")
    dataclasses.replace(result, threat=atas.L2(0.5)).save(folder / "evaluation-l2-0.5.json")
    (folder / "evaluation-l2-0.5.progress.json").write_text("{}")
    found = sections_of(text_of(folder))["Results"]
    headings = [line for line in found.splitlines() if line.startswith("### ")]
    assert ["Linf(0.1)" in headings[0], "L2(0.5)" in headings[1], len(headings)] == [True, True, 2]


def test_a_collapse_is_told(copy_of):
    folder = copy_of()
    rows = [row | {"collapsed": row["epoch"] == 1} for row in metric_rows(folder)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "**Training collapsed** (catastrophic overfitting, detected in epoch 2)" in text_of(folder)


def test_a_standard_model_is_said_not_to_be_robust(train_tiny, tmp_path):
    run = train_tiny(tmp_path / "run", {"method.name": "standard", "training.epochs": 1})
    found = sections_of(text_of(run.folder))
    assert "Expect no robustness at all" in found["Limits"]
    assert found["Threat model"].strip().startswith("None: trained without attacks.")
    assert "2206.02417" not in found["Training"]


def test_names_from_files_cannot_break_out(train_tiny, tmp_path):
    digits = atas.data.load("digits")
    names = ["</script><script>alert(1)</script>", "a`b\n# heading", *(str(i) for i in range(2, 10))]
    halves = [atas.data.Split(half.images, half.labels, tuple(names)) for half in (digits.train, digits.test)]
    data = atas.data.Dataset("x`\n---\nevil: true", *halves)
    run = train_tiny(tmp_path / "run", {"training.epochs": 1}, data=data)
    text = text_of(run.folder)
    assert "<script>" not in text
    assert "\n# heading" not in text
    assert text.count("\n---\n") == 1
    assert [line for line in text.splitlines() if line.startswith("evil")] == []


def test_where_the_data_lay_is_not_published(evaluated):
    run = atas.Run.load(evaluated)
    recipe = dataclasses.replace(run.recipe, data=dataclasses.replace(run.recipe.data, root="/home/me/secret"))
    text = render_card(ExportSource.load(dataclasses.replace(run, recipe=recipe)), WRITTEN)
    assert "secret" not in text


def test_the_front_matter_is_what_hubs_read(evaluated):
    lines = text_of(evaluated).splitlines()
    end = lines.index("---", 1)
    assert lines[0] == "---"
    found = {line.partition(": ")[0]: json.loads(line.partition(": ")[2]) for line in lines[1:end]}
    assert found["library_name"] == "atas"
    assert found["pipeline_tag"] == "image-classification"
    assert "atas" in found["tags"]


def test_an_unfinished_run_has_no_card(copy_of):
    folder = copy_of()
    (folder / "model.safetensors").unlink()
    with pytest.raises(atas.AtasError, match="has not finished"):
        atas.export.write(folder, "safetensors")


def test_the_randomised_autoattack_counts_as_autoattack(copy_of, with_autoattack):
    folder = copy_of()
    result = with_autoattack(folder)
    correct, seconds = (
        {name.replace("autoattack", "autoattack-rand"): value for name, value in values.items()}
        for values in (result.correct, result.seconds)
    )
    dataclasses.replace(result, correct=correct, seconds=seconds).save(folder / "evaluation.json")
    assert "not evaluated with AutoAttack" not in sections_of(text_of(folder))["Limits"]


@pytest.mark.parametrize("attacks", [("fgsm", "pgd10"), ("fgsm", "autoattack")])
@pytest.mark.parametrize("kind", [None, "square"])
def test_card_and_report_quote_the_same_worst_case(copy_of, attacks, kind):
    """Also where AutoAttack on fewer images is in another file."""
    folder = copy_of()
    result = atas.Evaluation.load(folder / "evaluation.json")
    n = 400
    correct = {name: torch.arange(n) < 310 - 10 * row for row, name in enumerate(("clean", *attacks))}
    correct["worst"] = correct[attacks[-1]]
    warnings = () if kind is None else (EvaluationWarning(kind, "it breaks more"),)
    first = dataclasses.replace(
        result,
        correct=correct,
        seconds=dict.fromkeys(correct, 1.0),
        stages={},
        broken_by={},
        warnings=warnings,
        details=None,
    )
    first.save(folder / "evaluation.json")
    few = {name: torch.arange(20) < 14 for name in ("clean", "autoattack", "worst")}
    dataclasses.replace(first, correct=few, seconds=dict.fromkeys(few, 1.0)).save(folder / "few.json")
    (run,) = report.summarise([folder])
    source = ExportSource.load(folder)
    assert source.result.accuracy == run.evaluation.accuracy
    assert source.verdict == run.verdict
    expected = "not known" if kind else "72.5%" if "autoattack" in attacks else "at most 72.5%"
    assert str(run.verdict) == expected
    assert f"**The worst case is {expected}" in sections_of(text_of(folder))["Results"]
