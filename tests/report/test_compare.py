"""Runs side by side: what is read from their folders, and the table of it."""

import json
from dataclasses import replace

import pytest

from atas import report
from atas.errors import DataError
from atas.evaluation import EvaluationWarning, wilson
from atas.models.weights import read_weights, save_weights
from atas.report.headline import run_answers

COLLAPSE = [(0.5, 0.4, 0.35), (0.7, 0.6, 0.45), (0.8, 0.9, 0.02), (0.8, 0.95, 0.0)]


def test_summarise_reads_runs(make_run):
    first = make_run("a/first", right={"clean": 90, "fgsm": 55, "pgd50": 47})
    second = make_run("a/second", "fgsm-rs", COLLAPSE, collapsed_from=2)
    one, two = report.summarise([first, str(second)])
    assert (one.name, two.name) == ("first", "second")
    assert (one.recipe.method.name, two.recipe.method.name) == ("atas", "fgsm-rs")
    assert (one.seconds, two.seconds) == (5.0, 10.0)
    assert (one.collapse_epoch, two.collapse_epoch) == (None, 3)
    assert one.evaluation.accuracy["pgd50"] == 0.47
    assert two.evaluation is None
    assert [row["epoch"] for row in two.epochs] == [0, 1, 2, 3]


def test_names_are_unique_by_folder(make_run, tmp_path, monkeypatch):
    make_run("runs/one/atas"), make_run("runs/two/atas"), make_run("runs/two/atta", "atta")
    monkeypatch.chdir(tmp_path)
    found = report.summarise(["runs/one/atas", "runs/two/atas", "runs/two/atta"])
    assert [run.name for run in found] == ["runs/one/atas", "runs/two/atas", "runs/two/atta"]
    found = report.summarise(["runs/one/atas", "runs/two/atta"])
    assert [run.name for run in found] == ["atas", "atta"]
    found = report.summarise(["runs/one/atas/", "runs/two/../two/atta/"])
    assert [run.name for run in found] == ["atas", "atta"]


def test_the_folder_that_one_is_in_has_a_name(make_run, monkeypatch):
    monkeypatch.chdir(make_run("runs/here"))
    (run,) = report.summarise(["."])
    assert run.name == "here"


def test_rows_that_a_rollback_took_back_do_not_count(make_run):
    again = {"epoch": 2, "updates": 30, "rate": 0.1, "loss": 1.0, "train_accuracy": 0.5, "clean": 0.8, "fgsm": 0.5}
    again |= {"pgd10": 0.45, "collapsed": False, "seconds": 12.0}
    collapse = {"event": "collapse", "epoch": 2, "pgd10": 0.0, "fgsm": 0.9}
    events = [collapse, {"event": "rollback", "epoch": 2, "to_epoch": 2}, again]
    (run,) = report.summarise([make_run("run", curve=COLLAPSE[:3], collapsed_from=2, events=events)])
    assert [row["pgd10"] for row in run.epochs] == [0.35, 0.45, 0.45]
    assert run.collapse_epoch is None
    assert run.seconds == 12.0


def test_a_line_that_a_crash_cut_off_is_left_out(make_run):
    folder = make_run("run")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 2, "clea')
    (run,) = report.summarise([folder])
    assert len(run.epochs) == 2


def test_as_plain_values(make_run):
    one, two = report.summarise(
        [make_run("one", right={"clean": 90, "pgd10": 40}), make_run("two", "fgsm", COLLAPSE, collapsed_from=2)]
    )
    row = one.to_json()
    assert json.loads(json.dumps(row)) == row
    assert row["accuracy"] == {"clean": 0.9, "pgd10": 0.4, "worst": 0.4}
    assert row["interval"]["pgd10"] == pytest.approx(list(wilson(40, 100)))
    assert (row["run"], row["method"], row["threat"], row["epochs"], row["n"]) == ("one", "atas", "Linf(8/255)", 2, 100)
    row = two.to_json()
    assert (row["accuracy"], row["interval"], row["n"], row["collapsed_in_epoch"]) == (None, None, None, 3)


def test_the_table(make_run, show):
    runs = report.summarise(
        [
            make_run("one", right={"clean": 90, "pgd10": 40}),
            make_run("two", "fgsm-rs", COLLAPSE, collapsed_from=2, right={"clean": 85, "fgsm": 95}),
            make_run("three", "atta"),
        ]
    )
    text = show(report.table(runs))
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip() and "─" not in line}
    assert list(lines)[:4] == ["run", "one", "two", "three"]
    for column in ("method", "threat", "clean %", "pgd10 %", "fgsm %", "time", "collapse"):
        assert column in lines["run"]
    assert "worst case %" in lines["run"]
    assert "at most 40.0 [" in lines["one"]
    assert "at most: without AutoAttack, an upper bound" in text
    low, high = wilson(40, 100)
    assert f"40.0 [{100 * low:.1f}, {100 * high:.1f}]" in lines["one"]
    assert lines["one"].split()[-1] == "no"
    assert lines["two"].split()[-2:] == ["epoch", "3"]
    assert lines["three"].split()[1:7] == ["atta", "Linf(8/255)", "-", "-", "-", "-"]
    assert "not evaluated; run atas evaluate" in text


def test_figures_of_other_weights_are_marked(copy_of, view_of, show, small_net):
    folder, same = copy_of("[retrained]"), copy_of("same")
    path = folder / "model.safetensors"
    about, _ = read_weights(path)
    save_weights(path, small_net(channels=1, classes=10), about)
    runs = report.summarise([folder, same])
    assert [run.to_json()["other_weights"] for run in runs] == [True, False]
    lines = show(report.table(runs)).splitlines()
    marked, unmarked = (next(line for line in lines if name in line) for name in ("[retrained]", "same"))
    assert (marked.count("]*"), unmarked.count("*")) == (5, 0)
    assert any("*: result of other weights than those in the folder; evaluate again" in line for line in lines)
    assert view_of(folder).weights_differ
    path.write_bytes(b"damaged")
    assert report.summarise([folder])[0].weights_differ is None


def test_the_table_without_a_gap_has_no_footnote(make_run, show):
    text = show(report.table(report.summarise([make_run("one", right={"clean": 90})])))
    assert "not evaluated" not in text


def test_runs_that_cannot_be_compared_are_refused(make_run, tmp_path):
    with pytest.raises(DataError, match="is not the folder of a run"):
        report.summarise([tmp_path])
    with pytest.raises(DataError, match="has no finished epoch"):
        report.summarise([make_run("new", curve=())])
    folder = make_run("damaged", right={"clean": 90})
    (folder / "evaluation.json").write_text("{}")
    with pytest.raises(DataError, match="is damaged"):
        report.summarise([folder])


def test_a_further_result_fills_in_what_the_first_one_lacks(make_run, add_result, show):
    first = make_run("first", right={"clean": 90, "pgd50": 60})
    add_result(first, "autoattack.json", n=50, clean=50, autoattack=29)
    (run,) = report.summarise([first])
    text = show(report.table([run]))
    assert "60.0 [50.2, 69.1]" in text
    assert "58.0 [44.2, 70.6] of 50" in text
    assert "at most 60.0 [50.2, 69.1]" in text
    assert run.to_json()["accuracy"]["worst"] == 0.6
    assert [(one["n"], one["accuracy"]["autoattack"]) for one in run.to_json()["more"]] == [(50, 0.58)]


@pytest.mark.parametrize(
    ("right", "kind", "expected"),
    [
        ({"pgd50": 60, "autoattack": 55}, None, " 55.0 ["),
        ({"pgd50": 60}, None, " at most 60.0 ["),
        ({"pgd50": 60, "autoattack": 55}, "square", " not known "),
    ],
)
def test_the_worst_case_is_told_as_on_the_page(make_run, view_of, show, right, kind, expected):
    folder = make_run("first", right={"clean": 90, **right})
    view = view_of(folder)
    warnings = () if kind is None else (EvaluationWarning(kind, "Square breaks more"),)
    run = replace(view.summary, evaluation=replace(view.summary.evaluation, warnings=warnings))
    line = next(line for line in show(report.table([run])).splitlines() if "first" in line)
    assert expected in line
    view.summary = run
    word = run_answers(view, None)[0].word.lower()
    assert str(run.verdict) in word
    assert run.to_json()["worst_case"] == str(run.verdict)
