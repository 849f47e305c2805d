"""The page as a file: what it holds, what stands where something is missing, and that nothing gets out of its place."""

import dataclasses
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from helpers.run_files import recipe_text

import atas
from atas import recipes, report
from atas.errors import DataError
from atas.evaluation import wilson
from atas.paper import published
from atas.report import page
from atas.report.sections.summary import paper_row
from atas.training import TrainingProgress
from atas.training.examples import read_examples, write_examples

SECTIONS = ["summary", "training", "steps", "gallery", "surface", "classes", "warnings", "repeat"]
HOSTILE = "</script><img src=x onerror=hacked=1>'\"&\u2028"


class Page(HTMLParser):
    """The elements of a page, and its text outside of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.elements, self._skip, self.text = [], None, ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._skip = tag if tag in ("script", "style") else self._skip

    def handle_endtag(self, tag):
        self._skip = None if tag == self._skip else self._skip

    def handle_data(self, data):
        self.text += "" if self._skip else f"{data} "

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture
def page_of(tmp_path, write_page):
    """The page of these runs."""

    def make(*folders, **options):
        text = write_page(folders, tmp_path / "page.html", **options).read_text(encoding="utf-8")
        assert len(text.encode()) < 5_000_000
        return Page(text)

    return make


def test_the_page_of_a_run(trained, healthy_page):
    found = Page(healthy_page.read_text(encoding="utf-8"))
    assert [attributes["id"] for attributes in found.all("section")] == SECTIONS
    (evaluation,) = [one.evaluation for one in report.summarise([trained])]
    for name in ("clean", "fgsm", "pgd10", "apgd-ce"):
        assert f"{100 * evaluation.accuracy[name]:.1f}" in found.text
    assert evaluation.sentence() in found.text
    assert "Not shown" not in found.text
    assert "atas train" in found.text
    assert "This run differs from it (method.eps: 0.39 became 0.1" in found.text
    images = found.all("img")
    assert len(images) > 30
    assert all(image["src"].startswith("data:image/png;base64,") and image["alt"] for image in images)
    plots = [attributes for tag, attributes in found.elements if attributes.get("class") == "plot"]
    assert len(plots) == 11
    assert all(plot["role"] == "img" and plot["aria-label"] for plot in plots)


def test_page_fetches_nothing(healthy_page):
    found = Page(healthy_page.read_text(encoding="utf-8"))
    for tag, attributes in found.elements:
        for key in ("src", "href", "action", "data", "poster"):
            value = attributes.get(key, "#")
            assert value.startswith(("#", "data:image/png;base64,")), (tag, key, value)
        assert not {key for key in attributes if key.startswith("on")}
    assert not found.all("link")
    (policy,) = [meta["content"] for meta in found.all("meta") if "http-equiv" in meta]
    assert policy.startswith("default-src 'none'")


def test_a_run_without_evaluation(copy_of, page_of):
    found = page_of(copy_of(without=["evaluation.json"]))
    assert [attributes["id"] for attributes in found.all("section")] == SECTIONS
    assert "The run has not been evaluated" in found.text
    assert "nan" not in found.text.lower().split()


def test_corruptions_are_shown_beside_attacks(copy_of, edit_evaluation, page_of):
    folder, counts = copy_of(), (38, 36, 30, 24, 10)
    values = {
        "right": counts,
        "accuracy": [count / 40 for count in counts],
        "interval": [wilson(count, 40) for count in counts],
    }
    edit_evaluation(folder, corruptions={"jpeg": values})
    text = " ".join(page_of(folder).text.split())
    assert "jpeg 95.0 90.0 75.0 60.0 25.0 14.2 to 40.2" in text
    assert "under common corruptions" not in page_of(copy_of("plain")).text


def test_corruptions_of_another_result_are_shown(copy_of, edit_evaluation, page_of):
    """As of an evaluation without AutoAttack, which is written next to one with it."""
    folder, first, counts = copy_of(), copy_of("first"), (38, 36, 30, 24, 10)
    values = {
        "right": counts,
        "accuracy": [count / 40 for count in counts],
        "interval": [wilson(count, 40) for count in counts],
    }
    edit_evaluation(folder, corruptions={"jpeg": values})
    (folder / "evaluation.json").rename(folder / "evaluation-fgsm.json")
    (first / "evaluation.json").rename(folder / "evaluation.json")
    assert "jpeg 95.0 90.0 75.0 60.0 25.0 14.2 to 40.2" in " ".join(page_of(folder).text.split())


def test_a_collapsed_run(copy_of, collapse, page_of):
    folder = copy_of()
    collapse(folder)
    text = page_of(folder).text
    assert "Catastrophic overfitting in epoch 3" in text
    assert "Training collapsed in epoch 3" in text


def test_a_run_that_broke_down(copy_of, page_of):
    folder = copy_of()
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    rows.insert(3, json.dumps({"event": "breakdown", "epoch": 1, "clean": 0.112}))
    (folder / "metrics.jsonl").write_text("".join(row + "\n" for row in rows))
    text = page_of(folder).text
    assert "The training broke down in epoch 2" in text
    assert "clean accuracy fell to 11.2%" in text
    assert "saw no collapse" not in text


def test_a_run_of_an_earlier_version(copy_of, page_of):
    """Without what is logged now: by tenth, of the probe, the commit."""
    folder = copy_of()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    old = ("epoch", "updates", "rate", "loss", "train_accuracy", "clean", "fgsm", "pgd10", "collapsed", "seconds")
    text = "".join(json.dumps({key: row[key] for key in old}) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text)
    (folder / "environment.json").unlink()
    assert "did not log gradient norms" in page_of(folder).text


def test_the_same_files_give_the_same_page_without_model_and_data(copy_of, trained, tmp_path):
    """The weights are needed for their hash alone."""
    pages = []
    folder = copy_of(trained.name, without=["checkpoints/last.safetensors"])
    text = recipe_text(folder).replace('name = "digits"', 'name = "mine:nowhere"')
    for number, source in enumerate((trained, trained, folder)):
        report.write_page([source], tmp_path / f"{number}.html")
        pages.append((tmp_path / f"{number}.html").read_text(encoding="utf-8").replace(str(source), "RUN"))
    assert pages[0] == pages[1] == pages[2]
    (folder / "recipe.toml").write_text(text)
    (folder / "model.safetensors").unlink()
    report.write_page([folder], tmp_path / "bare.html")
    found = Page((tmp_path / "bare.html").read_text(encoding="utf-8"))
    assert [attributes["id"] for attributes in found.all("section")] == SECTIONS
    assert "Not shown" not in found.text


def test_a_page_loads_no_model_and_no_data(trained, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError

    monkeypatch.setattr("torch.nn.Module.__call__", refuse)
    monkeypatch.setattr("atas.data.load", refuse)
    monkeypatch.setattr("atas.models.create", refuse)
    report.write_page([trained], tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size > 100_000


def test_results_of_an_earlier_version_still_give_a_page(copy_of, page_of):
    found = page_of(copy_of(without=["evaluation.safetensors", "training_examples.safetensors"]))
    assert [attributes["id"] for attributes in found.all("section")] == SECTIONS
    assert found.text.count("Not shown. The result was written by an earlier version, without images") == 3
    assert "the run was trained with a version that did not store it" in found.text
    assert not found.all("img")


@pytest.mark.parametrize("name", ["evaluation.safetensors", "training_examples.safetensors"])
def test_damaged_images_are_told(copy_of, tmp_path, name):
    folder = copy_of()
    content = bytearray((folder / name).read_bytes())
    content[-5] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name} is damaged"):
        report.write_page([folder], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_data_that_was_given_in_python(tmp_path, page_of, small_net):
    """Neither model nor data have a name to load them by."""
    images = np.random.default_rng(0).integers(0, 256, (40, 3, 8, 8), dtype=np.uint8)
    labels = np.arange(40) % 4
    given = atas.data.from_arrays("mine", images, labels, images, labels)
    settings = recipes.from_dict({"training": {"epochs": 1, "batch_size": 20, "probe": 8}}, "mine")
    settings = settings.with_values({"data.pad": 1, "engine.device": "cpu"})
    atas.train(settings, out=tmp_path / "run", model=small_net(), data=given, live=TrainingProgress(quiet=True))
    found = page_of(tmp_path / "run")
    assert "atas on mine, SmallNet" in found.text
    assert f'atas.evaluate(model, x_test, y_test, threat).save("{tmp_path}/run/evaluation.json")' in found.text
    assert "run that program again" in found.text
    assert "atas evaluate" not in found.text


@pytest.mark.slow
def test_hostile_names(copy_of, view_of):
    folder = copy_of(f"run {HOSTILE}".replace("/", "\u2215"))
    text = recipe_text(folder)
    renamed = re.sub("^name = .*", lambda _: f"name = {json.dumps(HOSTILE)}", text, count=1, flags=re.MULTILINE)
    (folder / "recipe.toml").write_text(renamed)
    environment = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps(dict.fromkeys(environment, HOSTILE)))
    classes = tuple(f"{HOSTILE}{number}" for number in range(10))
    result = atas.Evaluation.load(folder / "evaluation.json")
    result = dataclasses.replace(result, details=dataclasses.replace(result.details, classes=classes))
    result.save(folder / "evaluation.json")
    path = folder / "training_examples.safetensors"
    write_examples(path, dataclasses.replace(read_examples(path), classes=classes))
    view = view_of(folder)
    for made in (page.render_run(view), page.render_comparison([view, view])):
        found = Page(made)
        assert "onerror" not in {key for _, attributes in found.elements for key in attributes}
        assert made.count("</script>") == len(found.all("script"))
        assert HOSTILE in found.text
    assert f"{HOSTILE}3" in Page(page.render_run(view)).text


def test_several_runs(make_run, page_of):
    curve = [(0.5, 0.4, 0.35), (0.8, 0.9, 0.02)]
    found = page_of(
        make_run("one", right={"clean": 90, "pgd10": 60}),
        make_run("two", "fgsm-rs", curve, collapsed_from=1, right={"clean": 85, "pgd10": 1}),
        make_run("three", "atta", curve=curve * 3),
    )
    assert [attributes["id"] for attributes in found.all("section")] == ["summary", "training", "warnings", "repeat"]
    assert "one" in found.text
    assert "59.0 points above two" in found.text
    assert len(re.findall(r"one, two\s+AutoAttack was not run", found.text)) == 1
    assert found.text.count("AutoAttack was not run: the results") == 1
    assert "two collapses at 2." in json.dumps(found.elements)
    assert "Not evaluated: three" in found.text


def test_a_tie_and_a_ranking_that_is_not_possible(make_run, page_of):
    even = page_of(make_run("a", right={"clean": 90, "pgd10": 60}), make_run("b", right={"clean": 90, "pgd10": 60}))
    assert "0.0 points above" in even.text
    assert "Not shown" in even.text
    none = page_of(make_run("c"), make_run("d"))
    assert "Fewer than two of the runs have been evaluated" in none.text


def test_the_paper_stands_beside(make_run, page_of):
    folder = make_run("row", right={"clean": 81, "pgd10": 50})
    text = recipe_text(folder)
    assert 'name = "cifar10"' in text
    assert "81.22" in page_of(folder, paper=published.lookup).text
    settings = recipes.load("cifar10-preact-resnet18-atas")
    assert paper_row(settings, published.lookup).autoattack == 45.38
    assert paper_row(settings, None) is None
    assert paper_row(settings.with_values({"method.norm": "l2", "method.dtype": "float16"}), published.lookup) is None


def test_folders_without_a_run_and_damaged_runs_are_refused(copy_of, tmp_path, page_of):
    with pytest.raises(DataError, match="is not the folder of a run"):
        page_of(tmp_path)
    folder = copy_of()
    (folder / "evaluation.json").write_text("{")
    with pytest.raises(DataError, match="is damaged"):
        page_of(folder)
    assert not (tmp_path / "page.html").exists()


def test_a_comparison_names_runs_with_results_of_other_weights(trained, copy_of, page_of):
    folder = copy_of("stale")
    result = atas.Evaluation.load(folder / "evaluation.json")
    dataclasses.replace(result, weights="0" * 16).save(folder / "evaluation.json")
    assert "Evaluated with other weights than those in the folder: stale." in page_of(trained, folder).text


def test_a_clean_only_result_is_not_repeated_with_an_empty_list_of_attacks(make_run, page_of):
    text = page_of(make_run("run", right={"clean": 90})).text
    assert "atas train" in text
    assert "--attacks" not in text
