"""What studies show of results that were made up."""

import json
from pathlib import Path

import pytest

from atas.errors import UsageError
from atas.paper.studies import get, names
from atas.paper.study import StudyOptions, make_plan

GOLDEN = Path(__file__).parent / "golden" / "table-cifar10.md"


@pytest.fixture
def request_of(store):
    """Make a request that writes into the store."""

    def make(**options):
        return StudyOptions(out=store.folder, **options)

    return make


@pytest.fixture
def page(store, request_of):
    """A study's page of what the store holds."""

    def make(name, **options):
        return get(name).page(request_of(**options), store)

    return make


@pytest.fixture
def trial_of(request_of):
    """The only trial of a request."""

    def make(name, **options):
        (trial,) = get(name).trials(request_of(**options))
        return trial

    return make


CELL = {"networks": ("preact-resnet18",), "eps": (8 / 255,)}


@pytest.fixture
def filled(fill, trial_of):
    """ATAS with three seeds and both evaluations, FGSM-RS with one, ATTA without any."""
    for seed, shift in ((0, 0), (1, 30), (2, -60)):
        cell = CELL | {"methods": ("atas",), "seeds": (seed,)}
        right = {"clean": 8150 + shift, "pgd10": 4900 + shift, "pgd50": 4750 + shift}
        fill(trial_of("table-cifar10", **cell), right | ({"autoattack": 4450} if seed == 0 else {}), seconds=30 + seed)
        padded = trial_of("table-cifar10", **cell, padding=(4,))
        fill(padded, {"clean": 8100 + shift, "pgd10": 5000 + shift}, seconds=30 + seed)
    rs = trial_of("table-cifar10", **CELL, methods=("fgsm-rs",))
    warning = "gradients are masked"
    fill(rs, {"clean": 8402, "pgd10": 1, "pgd50": 0, "autoattack": 0}, collapsed_in=24, warnings=[warning])


def test_a_table_to_the_letter(filled, page):
    found = page("table-cifar10", **CELL, methods=("atas", "atta", "fgsm-rs"))
    assert found.markdown == GOLDEN.read_text(encoding="utf-8")


def test_the_same_for_programs(filled, page):
    rows = json.loads(json.dumps(page("table-cifar10", **CELL, methods=("atas",)).content))["rows"]
    assert [(row["method"], row["padding"]) for row in rows] == [("fgsm-rs", 0), ("atas", 0), ("atas", 4)]
    row = rows[1]
    assert (row["seeds"], row["training_seconds"], row["eps"]) == ([0, 1, 2], [30, 31, 32], "8/255")
    assert row["ours"]["pgd50"]["percent"] == pytest.approx(47.40)
    assert row["ours"]["pgd50"]["spread"] == "range over seeds"
    assert row["ours"]["autoattack"]["spread"] == "95% interval"
    assert row["difference"]["pgd50"] == pytest.approx(47.40 - 48.18)
    assert row["paper"]["hours"] == 0.30
    assert rows[0]["collapsed_in_epoch"] == [24]
    assert len(set(row["runs"])) == 3


def test_results_of_other_requests_are_shown(filled, page):
    """A table is of all that its folder holds, whatever was asked for last."""
    found = page("table-cifar10", methods=("pgd",), networks=("wrn-28-10",), eps=(16 / 255,)).markdown
    assert found.index("8/255, preact-resnet18") < found.index("16/255, wrn-28-10")
    assert "| fgsm-rs | ours" in found
    assert "12/255" not in found


@pytest.mark.slow
def test_a_run_that_was_not_attacked_is_shown_where_it_is_asked_for(fill, trial_of, page):
    """Figures leave runs at clean images."""
    fill(trial_of("table-cifar10", **CELL, methods=("fgsm-rs-adaptive",)), {"clean": 8328})
    assert "fgsm-rs-adaptive" not in page("table-cifar10", **CELL, methods=("atas",)).markdown
    assert "83.28" in page("table-cifar10", **CELL, methods=("fgsm-rs-adaptive",)).markdown


def test_a_failed_run_is_in_the_table(store, trial_of, page):
    trial = trial_of("table-cifar10", **CELL, methods=("ssat",))
    store.save_error(trial, "the loss is nan", "")
    found = page("table-cifar10", **CELL, methods=("ssat",)).markdown
    assert "failed" in found
    assert f"- {trial.label}: the loss is nan" in found


def test_atas_as_printed_stands_beside_the_papers_atas(page):
    found = page("table-cifar10", **CELL, methods=("atas", "atas-literal")).markdown
    assert found.count("81.22") == 2


def test_a_quick_table_has_nothing_of_the_papers(page):
    found = page("table-cifar100", quick=True).markdown
    assert "the paper has no such rows" in found
    assert found.count("| no such row") == 8


@pytest.mark.parametrize(
    ("name", "options", "count"),
    [
        ("table-cifar10", {}, 48),
        ("table-cifar10", {"seeds": (0, 1, 2), "methods": ("atas", "atta"), "eps": (8 / 255,)}, 12),
        ("table-cifar10", {"padding": (0, 4), "networks": ("wrn-28-10",)}, 48),
        ("table-cifar100", {}, 48),
        ("table-imagenet", {}, 22),
        ("ablation", {}, 60),
        ("schedules", {}, 16),
        ("table-cifar10", {"quick": True}, 8),
        ("ablation", {"quick": True}, 12),
        ("schedules", {"quick": True}, 16),
    ],
)
def test_how_many_runs(name, options, count, request_of):
    trials = get(name).trials(request_of(**options))
    assert len(trials) == count
    for trial in trials:
        assert trial.resolved_recipe.method.name


def test_cells_that_have_no_recipe_of_their_own(trial_of):
    trial = trial_of("table-cifar100", methods=("trades",), networks=("wrn-28-10",), eps=(12 / 255,))
    settings = trial.resolved_recipe
    assert (settings.data.name, settings.model.name, settings.method.name) == ("cifar100", "wrn-28-10", "trades")
    assert settings.method.eps == 12 / 255


def test_a_value_that_only_some_methods_have(filled, page):
    found = page("table-cifar10", **CELL, methods=("atas",), values={"method.max_step": 16 / 255}).markdown
    assert "81.40 (80.90 to 81.80)" in found  # it is the recipe's own


def test_imagenet_as_the_paper_says(request_of):
    trials = get("table-imagenet").trials(request_of(networks=("resnet18",), eps=(4 / 255,)))
    settings = {trial.resolved_recipe.method.name: trial.resolved_recipe for trial in trials}
    atas, free, align = settings["atas"], settings["free"], settings["fgsm-ga"]
    assert (atas.training.epochs, atas.optimizer.weight_decay) == (90, 1e-4)
    assert (atas.method.settings["c"], atas.method.settings["clip"]) == (12.8, (4 / 255, 8 / 255))
    assert atas.schedule.milestones == (50 / 90, 75 / 90)
    assert (free.training.epochs, free.method.settings["replays"]) == (45, 4)
    assert (settings["yopo"].training.epochs, align.method.settings["weight"]) == (36, 0.01)


def test_the_ablation_shares_runs_with_the_table(request_of, trial_of):
    base = trial_of("table-cifar10", **CELL, methods=("atas",))
    keys = [trial.key for trial in get("ablation").trials(request_of(eps=(8 / 255,)))]
    assert keys.count(base.key) == 2  # gamma/c = 16/255 and c = 0.01 are the same run
    assert len(set(keys)) == 18


def test_the_ablation_beside_the_paper(fill, request_of, page):
    for trial in get("ablation").trials(request_of(eps=(8 / 255,))):
        steps = trial.resolved_recipe.method.settings["max_step"] * 255
        fill(trial, {"clean": 8000, "autoattack": 4400 + round(steps)})
    found = page("ablation", eps=(8 / 255,)).markdown
    lines = [" ".join(line.split()) for line in found.splitlines()]
    first = lines.index("| 20/255 | ours | 44.20 [43.2, 45.2] | 30.0 s |")
    assert lines[first + 1 : first + 3] == ["| | paper | 45.60 | |", "| | difference | -1.40 | |"]
    assert found.count("## AutoAttack") == 4
    rows = page("ablation", eps=(8 / 255,)).content["rows"]
    assert {row["clip"] for row in rows} == {"clipped", "unclipped"}


def test_the_better_schedule(fill, request_of, page):
    options = {"methods": ("atas", "fgsm-rs")}
    for trial in get("schedules").trials(request_of(**options)):
        assert (trial.held_out, trial.attacks) == (5000, ("pgd10",))
        schedule = trial.resolved_recipe.schedule
        assert schedule.peak == {"piecewise": 0.1, "cyclic": 0.2}[schedule.name]
        count = {("atas", "piecewise"): 2500, ("atas", "cyclic"): 2300}.get(
            (trial.resolved_recipe.method.name, schedule.name), 2400
        )
        fill(trial, {"clean": 4000, "pgd10": count + (schedule.name == "cyclic")}, n=5000)
    lines = [" ".join(line.split()) for line in page("schedules", **options).markdown.splitlines()]
    assert any(line.startswith("| fgsm-rs |") and "| cyclic, perhaps | cyclic |" in line for line in lines)
    assert any(line.startswith("| atas |") and "| piecewise | piecewise |" in line for line in lines)


def test_a_schedule_of_a_methods_own(request_of):
    trials = get("schedules").trials(request_of(methods=("free", "fgsm-ga")))
    peaks = {
        (t.resolved_recipe.method.name, t.resolved_recipe.schedule.name): t.resolved_recipe.schedule.peak
        for t in trials
    }
    assert peaks == {
        ("free", "piecewise"): 0.04,
        ("free", "cyclic"): 0.04,
        ("fgsm-ga", "piecewise"): 0.1,
        ("fgsm-ga", "cyclic"): 0.3,
    }


def test_every_module_is_a_study_of_its_name():
    assert {"table-cifar10", "table-cifar100", "table-imagenet", "ablation", "schedules", "theory"} <= set(names())
    for name in names():
        assert get(name).name == name
        assert get(name).about


@pytest.mark.parametrize(
    ("name", "options", "part"),
    [
        ("table-cifar10", {"methods": ("atass",)}, "did you mean 'atas'"),
        ("table-cifar10", {"networks": ("resnet50",)}, "unknown network 'resnet50'"),
        ("table-cifar10", {"eps": (0.1,)}, "unknown budget '0.1'"),
        ("ablation", {"methods": ("atas",)}, "does not take --methods"),
        ("schedules", {"attacks": ("fgsm",)}, "does not take --attacks"),
        ("table-cifar10", {"values": {"training.epoch": 1}}, "did you mean 'training.epochs'"),
    ],
)
def test_wrong_wishes(name, options, part, request_of):
    with pytest.raises(UsageError, match=part):
        make_plan([get(name)], request_of(**options))
