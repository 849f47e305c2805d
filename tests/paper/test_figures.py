"""The paper's figures: every one has a plan, a quick form that runs, a picture and the table behind it."""

import json
from dataclasses import replace

import pytest
import torch

from atas.data import Dataset, Split, cifar
from atas.data.cifar import CIFAR100
from atas.paper.figure_study import FigureStudy, MeasuredStudy
from atas.paper.studies import get, names
from atas.paper.study import StudyOptions, make_plan
from atas.sweeps import Store

STUDIES = (
    "figure-loss-surface",
    "figure-subsets",
    "figure-step-size",
    "figure-adaptive",
    "figure-convergence",
    "figure-budgets",
    "figure-gradient-norms",
    "figure-steps",
    "figure-atta-atas",
    "table-convergence-gap",
)
PICTURES = [name for name in STUDIES if name.startswith("figure-")]
SHORT = {  # what is left out of the tiny forms is more of the same
    "figure-convergence": ["--methods", "fgsm-rs,atas"],
    "figure-budgets": ["--methods", "atas", "--eps", "0.25"],
    "figure-step-size": ["--methods", "atta"],
    "figure-gradient-norms": ["--eps", "0.25"],
    "figure-subsets": ["--methods", "fgsm-rs"],
}
TINY = ("training.epochs=2", "training.batch_size=1297", "training.probe=40", "engine.device=cpu")


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """One folder for all studies, so that they share their runs."""
    return tmp_path_factory.mktemp("figures")


@pytest.fixture
def page(fill, store):
    """The page and content of a full study, of made-up results."""

    def make(name, **options):
        found = get(name).page(StudyOptions(store.folder, **options), store)
        return found.markdown, found.content

    return make


def about(values):
    return {"weights": "w", "environment": {"device": "NVIDIA H200"}, **values}


def tell(store, trial, **observed):
    """Add made-up observations to a trial's record."""
    record = store.record(trial)
    store.save(trial, replace(record, observed={name: about(values) for name, values in observed.items()}))


# The contract


def test_the_list_has_them(command):
    assert set(STUDIES) <= set(names())
    status, out, _ = command("reproduce", "--list")
    assert status == 0
    assert set(STUDIES) <= set(out.split())


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("quick", [True, False])
def test_plans_resolve(name, quick, tmp_path):
    study = get(name)
    plan = make_plan([study], StudyOptions(tmp_path / "out", quick=quick))
    assert plan.trials
    for trial in plan.trials:
        assert trial.resolved_recipe.data.name == ("digits" if quick else trial.resolved_recipe.data.name)
        assert (trial.resolved_recipe.model.name == "small-cnn") is quick
        assert trial.label
    assert not (tmp_path / "out").exists()
    page = study.page(StudyOptions(tmp_path / "out", quick=quick), Store(tmp_path / "out"))  # with nothing to show
    assert page.markdown.startswith(f"# {study.title}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["figure-loss-surface", "figure-step-size", "figure-budgets", "figure-steps"])
def test_a_picture_of_nothing_is_a_picture(name, tmp_path):
    study = get(name)
    request = StudyOptions(tmp_path, quick=True)
    png, svg = study.draw(request, Store(tmp_path))
    assert png.read_bytes()[:4] == b"\x89PNG"
    assert svg.read_text().startswith("<?xml")


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_a_tiny_form_from_end_to_end(name, command, shared, monkeypatch):
    if name == "figure-subsets":
        monkeypatch.setattr(get(name), "quick_subsets", ((1, 4),))
    sets = [part for value in TINY for part in ("--set", value)]
    options = ["--quick", "--examples", 10, *sets, "--out", shared, *SHORT.get(name, [])]
    status, out, err = command("reproduce", name, *options)
    assert status == 0, err
    page = (shared / f"{name}-quick.md").read_text()
    assert out.startswith(page)
    for part in ("The paper: ", "Here: ", "quick form", "training.epochs = 2", "cpu"):
        assert part in page
    assert " - " not in page.partition("| ")[2].partition("\n\n")[0].replace("paper's mean step", "") or name in (
        "figure-gradient-norms",
        "figure-budgets",
        "figure-atta-atas",
        "figure-adaptive",
    )  # only the paper's figures are missing
    content = json.loads((shared / f"{name}-quick.json").read_text())
    assert content["rows"]
    assert isinstance(get(name), FigureStudy) == (name in PICTURES)
    for kind in ("png", "svg"):
        assert (shared / f"{name}-quick.{kind}").exists() == (name in PICTURES)
        assert (f"{name}-quick.png" in page) == (name in PICTURES)

    if name == "figure-loss-surface":  # it has a run that rests on another, and weights that were removed
        status, _, err = command("reproduce", name, *options)
        assert status == 0
        assert err == "2 of 2 runs are done already\n"


@pytest.mark.slow
def test_full_plans_share_their_runs(tmp_path):
    """What the tables train is not trained again."""
    tables = {
        t.training_key for name in ("table-cifar10", "table-cifar100") for t in get(name).trials(StudyOptions(tmp_path))
    }
    new = {
        name: {trial.training_key for trial in get(name).trials(StudyOptions(tmp_path))} - tables for name in STUDIES
    }
    assert {name: len(keys) for name, keys in new.items()} == {
        "figure-loss-surface": 2,
        "figure-subsets": 38,
        "figure-step-size": 12,
        "figure-adaptive": 2,
        "figure-convergence": 0,
        "figure-budgets": 0,
        "figure-gradient-norms": 0,
        "figure-steps": 0,
        "figure-atta-atas": 1,
        "table-convergence-gap": 0,
    }
    assert len(set().union(*new.values())) == 52  # the ranking, and steps of 8/255 and 14/255, are shared


def test_imagenet_is_run_where_its_networks_are_asked_for(tmp_path):
    for name in ("figure-gradient-norms", "figure-budgets"):
        trials = get(name).trials(StudyOptions(tmp_path, networks=("resnet18",)))
        assert {trial.resolved_recipe.data.name for trial in trials} == {"packed"}


def test_figures_need_matplotlib_before_they_train(command, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, err = command("reproduce", "figure-steps", "--quick", "--out", tmp_path / "out")
    assert status == 2
    assert "figures need matplotlib" in err
    assert not (tmp_path / "out").exists()


# Trials as the paper has them


def settings_of(name, **options):
    return [trial.resolved_recipe for trial in get(name).trials(StudyOptions(None, **options))]


def test_subsets_have_the_papers_settings():
    study = get("figure-subsets")
    trials = study.trials(StudyOptions(None))
    ranking, parts = trials[:2], trials[2:]
    assert [trial.resolved_recipe.method.name for trial in ranking] == ["fgsm-rs-adaptive", "atas-literal"]
    assert [round(255 * trial.resolved_recipe.method.settings["max_step"]) for trial in ranking] == [10, 4]
    atta = {
        (round(255 * t.resolved_recipe.method.eps), round(255 * t.resolved_recipe.method.settings["step_size"]))
        for t in parts
        if t.resolved_recipe.method.name == "atta"
    }
    assert atta == {(12, 15), (12, 18)}
    wanted = {"D_1^2", "D_1^3", "D_1^4", "D_7^10", "D_8^10", "D_9^10"}
    assert {str(trial.subset) for trial in parts} == wanted
    for trial in parts:
        own = ranking[0] if trial.resolved_recipe.method.name == "fgsm-rs" else ranking[1]
        assert trial.subset.ranking.key == own.key
        iterations = trial.resolved_recipe.training.epochs * -(-round(50_000 * trial.subset.share) // 128)
        assert iterations == pytest.approx(30 * 391, rel=0.005)


def test_subsets_of_another_data_set_have_a_page(page):
    """The recipe is that of CIFAR-10 with another name of the data."""
    text, content = page("figure-subsets", methods=("fgsm-rs",), values={"data.name": "cifar100"})
    assert "data.name = cifar100" in text
    assert len(content["rows"]) == 24


@pytest.mark.slow
def test_subsets_of_another_data_set_train(command, tmp_path, monkeypatch):
    """Synthetic images in place of CIFAR-100: epochs follow from its size, not from that of the recipe's data."""
    draw = torch.Generator().manual_seed(0)

    def split(count):
        images = torch.randint(256, (count, 3, 8, 8), dtype=torch.uint8, generator=draw)
        return Split(images, torch.arange(count) % 100, CIFAR100.classes)

    dataset = Dataset("cifar100", split(300), split(20))
    monkeypatch.setitem(cifar.SPECS, "cifar100", replace(CIFAR100, train_count=300, test_count=20))
    monkeypatch.setattr("atas.data.registry.read_cifar", lambda spec, root: dataset)
    monkeypatch.setattr(get("figure-subsets"), "quick_subsets", ((1, 4),))
    sets = (*TINY[2:], "training.epochs=2", "training.batch_size=50", "data.name=cifar100")
    options = ["--quick", "--methods", "fgsm-rs", "--no-pictures", "--root", tmp_path]
    values = [part for value in sets for part in ("--set", value)]
    status, out, err = command("reproduce", "figure-subsets", *options, *values, "--out", tmp_path / "out")
    assert status == 0, err
    assert "class 99" in out
    trials = get("figure-subsets").trials(
        StudyOptions(
            tmp_path,
            quick=True,
            methods=("fgsm-rs",),
            values={"data.name": "cifar100", "training.epochs": 2, "training.batch_size": 50},
        )
    )
    assert {trial.resolved_recipe.training.epochs for trial in trials[1:]} == {4}  # 3 of 120 images make 12 iterations


@pytest.mark.slow
def test_collapse_and_step_sizes_for_any_network_and_budget(tmp_path):
    cells = {"networks": ("wrn-28-10", "preact-resnet18"), "eps": (12 / 255, 16 / 255)}
    options = StudyOptions(tmp_path, **cells)
    study = get("figure-atta-atas")
    trials = [trial.resolved_recipe for trial in study.trials(options)]
    found = [(r.model.name, round(255 * r.method.eps), r.method.name) for r in trials]
    networks = ("preact-resnet18", "wrn-28-10")
    assert found == [(net, eps, name) for net in networks for eps in (12, 16) for name in ("atta", "atas")]
    assert all(r.method.settings["step_size"] == r.method.eps for r in trials[::2])
    last = study.page(options, Store(tmp_path)).content["rows"][-2]
    assert (last["panel"], last["line"]) == ("wrn-28-10, eps 16/255", "atta, step 16/255")

    study = get("figure-step-size")
    trials = [trial.resolved_recipe.method for trial in study.trials(replace(options, networks=("wrn-28-10",)))]
    steps = {
        (method.name, round(255 * method.eps)): sorted(
            round(255 * other.settings.get("step_size", 1.25 * other.eps))
            for other in trials
            if (other.name, other.eps) == (method.name, method.eps)
        )
        for method in trials
    }
    assert steps == {
        ("fgsm-rs", 12): [3, 6, 9, 12, 15, 18, 21, 24],
        ("atta", 12): [3, 4, 6, 9, 12, 15, 18],
        ("fgsm-rs", 16): [4, 8, 12, 16, 20, 24, 28, 32],
        ("atta", 16): [4, 8, 12, 16, 20, 24],
    }
    page = study.page(replace(options, pictures=False), Store(tmp_path))
    assert len(page.content["rows"]) == 2 * (16 + 13)
    assert {(row["network"], row["eps"]) for row in page.content["rows"]} == {
        (net, f"{eps}/255") for net in networks for eps in (12, 16)
    }
    measured = [trial for trial in study.trials(options) if len(trial.measurements) > 1]
    assert len(measured) == 8  # the model of the usual step, for each network, budget and method


def test_seeds_share_one_ranking():
    trials = get("figure-subsets").trials(StudyOptions(None, methods=("fgsm-rs",), eps=(8 / 255,), seeds=(1, 2)))
    assert [trial.seed for trial in trials] == [0, *[1] * 12, *[2] * 12]


def test_the_loss_surface_is_of_a_step_of_14():
    ranking, run = settings_of("figure-loss-surface")
    assert ranking.method.name == "fgsm-rs-adaptive"
    assert (run.method.name, round(255 * run.method.settings["step_size"])) == ("fgsm-rs", 14)


def test_adaptive_steps_are_on_the_wide_network():
    found = settings_of("figure-adaptive")
    assert {settings.model.name for settings in found} == {"wrn-28-10"}
    assert [settings.method.name for settings in found] == ["fgsm-rs", "fgsm-rs", "fgsm-rs-adaptive"]


def test_adaptive_steps_at_another_budget_and_on_another_network():
    cell = {"networks": ("preact-resnet18",), "eps": (12 / 255,)}
    fixed, usual, adaptive = get("figure-adaptive").trials(StudyOptions(None, **cell))
    for trial in (fixed, usual, adaptive):
        assert (trial.resolved_recipe.model.name, round(255 * trial.resolved_recipe.method.eps)) == (
            "preact-resnet18",
            12,
        )
    assert round(255 * fixed.resolved_recipe.method.settings["step_size"]) == 12
    (row,) = get("table-cifar10").trials(StudyOptions(None, methods=("fgsm-rs",), **cell))
    assert usual.training_key == row.training_key


def test_rankings_come_first_whatever_is_named_first(tmp_path):
    """A run that both studies share is observed with the ranks of another one."""
    studies = [get(name) for name in ("figure-step-size", "figure-loss-surface")]
    first, *others = make_plan(studies, StudyOptions(tmp_path)).trials
    assert first.resolved_recipe.method.name == "fgsm-rs-adaptive"
    assert [trial.key for trial in others] == [trial.key for trial in studies[0].trials(StudyOptions(tmp_path))]


def test_atta_steps_by_the_budget():
    atta, atas = settings_of("figure-atta-atas")
    assert round(255 * atta.method.settings["step_size"]) == 8
    assert atas.method.name == "atas"


# Pages of made-up results


def test_the_convergence_gap_beside_the_papers(page, fill, store):
    study = get("table-convergence-gap")
    losses = {"atta": 1.60, "atas": 1.50}
    for trial in study.trials(StudyOptions(store.folder, eps=(8 / 255,))):
        method = trial.resolved_recipe.method.name
        fill(trial, {"clean": 8000})
        seen = {"robust-loss": {"loss": losses[method], "n": 50_000}, "curves": {"loss": [2.0, losses[method] - 0.2]}}
        if method == "atas":
            seen["norms"] = {"tail": {"mean": 1.44}}
        tell(store, trial, **seen)
    text, content = page("table-convergence-gap", eps=(8 / 255,))
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| 8/255")
    ]
    ours, own, theirs = rows
    assert ours[2:] == ["1.44", "1.43", "1.01", "1.600", "1.500", "+0.100", "1.067", "0"]
    assert own[5:9] == ["1.400", "1.300", "+0.100", "1.077"]
    assert theirs[2:] == ["1.4", "", "", "", "", "+0.05", "1.03", ""]
    assert "50,000 training images" in text
    assert content["rows"][0]["atta"] == 1.60


@pytest.mark.slow
def test_budgets_beside_the_papers(page, fill, store):
    study = get("figure-budgets")
    asked = {"methods": ("atas",), "networks": ("preact-resnet18",), "eps": (8 / 255,)}
    first, _ = study.trials(StudyOptions(store.folder, **asked))
    fill(first, {"clean": 8100, "autoattack": 4500})
    text, _ = page("figure-budgets", **asked)
    (row,) = [line for line in text.splitlines() if line.startswith("| cifar10,")]
    assert "45.00 [44.0, 46.0]" in row
    assert "45.38" in row
    assert "-0.38" in row
    assert len(study.draw(StudyOptions(store.folder, **asked), store)) == 2


@pytest.mark.slow
def test_the_tail_beside_the_papers(page, fill, store):
    study = get("figure-gradient-norms")
    asked = {"networks": ("preact-resnet18",), "eps": (16 / 255,)}
    (trial,) = study.trials(StudyOptions(store.folder, **asked))
    fill(trial, {"clean": 8000})
    histogram = {"edges": [0.0, 1.0, 2.0], "counts": [30, 10]}
    tail = {"mean": 1.6, "largest": 1.3, "last": 1.8}
    tell(store, trial, norms={"tail": tail, "histogram": histogram, "average": {"norm": 0.8}})
    text, _ = page("figure-gradient-norms", **asked)
    (row,) = [line for line in text.splitlines() if line.startswith("| cifar10")]
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    assert cells[3:] == ["1.600", "1.300", "1.800", "1.6", "1.504", "1.064", "0"]
    assert len(study.draw(StudyOptions(store.folder, **asked), store)) == 2


def test_a_record_that_lacks_an_observation_is_not_shown(page, fill, store):
    study = get("figure-steps")
    assert isinstance(study, MeasuredStudy)
    (trial,) = study.trials(StudyOptions(store.folder, networks=("preact-resnet18",)))
    fill(trial, {"clean": 8000})
    assert not study.line_records(StudyOptions(store.folder, networks=("preact-resnet18",)), store)[0][1]
    assert len(make_plan([study], StudyOptions(store.folder, networks=("preact-resnet18",))).remaining()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bent", "shown"),
    [
        ("...b......bbb", ["8.00", "9.00", "10.00", "11.00", "12.00"]),  # the last turn, not the first
        ("bbbbbbbbbbbbb", ["0.00", "3.00", "6.00", "9.00", "12.00"]),
        (".............", ["0.00", "3.00", "6.00", "9.00", "12.00"]),
        (".b", ["0.00", "1.00"]),
    ],
)
def test_the_loss_surface_shows_the_distortion(bent, shown, fill, store):
    """Moments are drawn about the one at which the hard subset's loss came to be largest inside of the ball."""
    study = get("figure-loss-surface")
    request = StudyOptions(store.folder)
    trial = study.trials(request)[-1]
    fill(trial, {"clean": 8000})
    surfaces = {".": [[0.0] * 3, [0.5] * 3, [1.0] * 3], "b": [[0.0] * 3, [1.0] * 3, [0.5] * 3]}
    moments = [{"step": step, "1": surfaces["."], "10": surfaces[now]} for step, now in enumerate(bent)]
    seen = {"n": 500, "steps_an_epoch": 1, "moments": moments}
    tell(store, trial, surfaces=seen, curves={"collapsed_in": 11})
    axes = study.picture(request, store).axes
    assert [one.get_title() for one in axes if one.get_title()] == [f"epoch {epoch}" for epoch in shown]
