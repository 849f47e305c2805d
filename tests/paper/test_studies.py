"""Several studies in one command: one plan, a page for each."""

import json

import pytest

from atas.paper.studies import get
from atas.paper.study import StudyOptions, make_plan
from atas.sweeps import Store

TINY = [
    part
    for value in ("training.epochs=2", "training.batch_size=1297", "training.probe=40", "engine.device=cpu")
    for part in ("--set", value)
]


@pytest.mark.slow
def test_trial_of_several_studies_is_trained_once(command, tmp_path):
    """A table's run of ATTA keeps no checkpoint, which figure-step-size needs: alone, each would train it."""
    out, options = tmp_path / "out", ["--quick", "--examples", 20, *TINY]
    options += ["--methods", "atta", "--attacks", "fgsm", "--padding", 2]
    names = ["table-cifar10", "figure-step-size", "table-convergence-gap"]
    status, shown, err = command("reproduce", *names, *options, "--out", out)
    assert status == 0, err
    pages = [out / f"{name}-quick.md" for name in names]
    assert shown.count("written: ") == 8
    assert [page.read_text().splitlines()[0] in shown for page in pages] == [True] * 3
    trainings = [path.name for path in (out / "trainings").iterdir()]
    assert len(trainings) == 4  # three steps of ATTA, and ATAS
    assert not any("again" in name for name in trainings)

    status, shown, err = command("reproduce", *names, *options, "--out", out, "--json")
    assert (status, err) == (0, "5 of 5 runs are done already\n")
    content = json.loads(shown)
    assert list(content) == names
    assert content["figure-step-size"] == json.loads((out / "figure-step-size-quick.json").read_text())


@pytest.mark.slow
def test_pictures_can_be_drawn_later_and_elsewhere(command, tmp_path, monkeypatch):
    import sys

    options = ["reproduce", "figure-steps", "--quick", *TINY, "--out", tmp_path]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib", None)
        status, _, err = command(*options, "--no-pictures")
        assert status == 0, err
    assert not list(tmp_path.glob("*.png"))
    assert "png" not in (tmp_path / "figure-steps-quick.md").read_text()
    status, _, err = command(*options)
    assert (status, err) == (0, "1 of 1 runs are done already\n")
    assert (tmp_path / "figure-steps-quick.png").exists()
    assert "png" in (tmp_path / "figure-steps-quick.md").read_text()


@pytest.mark.slow
def test_known_results_can_be_shown_without_a_training(command, tmp_path):
    """Records that were copied are all it takes; what is missing is shown as missing."""
    options = ["--quick", "--examples", 20, *TINY, "--methods", "atas,atta"]
    command("reproduce", "figure-convergence", *options, "--methods", "atas", "--out", tmp_path / "first")
    first, second = tmp_path / "first", tmp_path / "second"
    names = ["figure-convergence", "table-convergence-gap"]
    status, _, err = command("reproduce", *names, *options, "--no-run", "--out", second, "--reuse", first)
    assert (status, err) == (0, "0 of 2 runs are done; missing runs are left out\n")  # a loss of ATAS is
    assert sorted(path.name for path in second.iterdir() if not path.name.startswith(".")) == [
        *(f"figure-convergence-quick.{kind}" for kind in ("json", "md", "png", "svg")),
        "runs",
        *(f"table-convergence-gap-quick.{kind}" for kind in ("json", "md")),
    ]
    atta, atas = json.loads((second / "figure-convergence-quick.json").read_text())["rows"]
    assert atta["by_epoch"]["loss"] == []
    assert len(atas["by_epoch"]["loss"][0]) == 2


def test_each_study_heeds_the_options_that_it_takes(tmp_path):
    request = StudyOptions(tmp_path, networks=("wrn-28-10",), padding=(4,), seeds=(1,))
    table, steps, gap = get("table-cifar10"), get("figure-steps"), get("table-convergence-gap")
    trials = make_plan([table, steps, gap], request).trials
    assert {trial.seed for trial in trials} == {1}
    assert len([trial for trial in trials if trial.padding == 4]) == 24
    assert len([trial for trial in trials if not trial.padding]) == 1 + 6
    assert {trial.resolved_recipe.model.name for trial in trials if trial.measurements} == {
        "wrn-28-10",
        "preact-resnet18",
    }


@pytest.mark.parametrize("option", [["--padding", "4"], ["--attacks", "pgd2"]])
def test_an_option_that_no_study_takes_is_a_mistake(option, command, tmp_path):
    status, _, err = command("reproduce", "figure-steps", "theory", *option, "--out", tmp_path / "out")
    assert status == 2
    assert f"none of these studies takes {option[0]}; leave it out" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_joint_plan_of_everything_on_cifar10_trains_nothing_twice(tmp_path):
    """Whatever the order of the studies, what is to be observed of a training is known when it begins."""
    names = ["table-cifar10", "ablation", "table-convergence-gap", "figure-step-size", "figure-loss-surface"]
    for order in (names, names[::-1]):
        trials = make_plan(list(map(get, order)), StudyOptions(tmp_path)).trials
        first = {}
        for trial in trials:
            observed = first.setdefault(trial.training_key, {found.name for found in trial.measurements})
            assert {found.name for found in trial.measurements} <= observed
        assert len(first) == len(trials)
    assert Store(tmp_path).by_row() == {}
