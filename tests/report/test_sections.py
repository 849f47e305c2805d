"""The sections show what was stored: against the evaluation, the training, and plain loops."""

import base64
import dataclasses
import io
import re

import numpy as np
import pytest
import torch
from PIL import Image

import atas
from atas import report
from atas.attacks.registry import display_name
from atas.evaluation import Stage, wilson
from atas.report.elements import Unavailable
from atas.report.formatting import format_interval
from atas.report.images import heat_map
from atas.report.run_view import RunView
from atas.report.sections.classes import ConfusionMatrix, classes_section
from atas.report.sections.examples import gallery_section, peaks_inside, surface_section
from atas.report.sections.seeds import seeds_section
from atas.report.sections.summary import summary_section
from atas.report.sections.training import steps_section
from atas.report.seed_groups import run_folders, summarise_groups

GRID = 21


# The gallery


def test_cards_show_the_verdicts(trained, view_of):
    view = view_of(trained)
    gallery = gallery_section(view).context["gallery"]
    evaluation, labels = view.evaluation, atas.data.load("digits").test.labels
    assert len(gallery.cards) == 24
    assert list(gallery.attacks) == ["fgsm", "pgd10", "apgd-ce"]
    for card in gallery.cards:
        assert card.label == labels[card.index]
        assert card.robust == bool(evaluation.correct["worst"][card.index])
        assert card.correct == bool(evaluation.correct["clean"][card.index])
        for variant in card.variants:
            assert variant.robust == bool(evaluation.correct[variant.attack][card.index])
            assert (variant.perturbation is None) == (variant.adversarial is None)
            assert variant.prediction.startswith(f"{card.class_name} ") == variant.robust
        assert card.variants[0].perturbation is not None, "FGSM changes every image"
        searched = next(variant for variant in card.variants if variant.attack == "apgd-ce")
        assert (searched.perturbation is None) == (searched.robust or not card.correct)
    orders = {card.outcome: card.order for card in gallery.cards}
    assert max(orders, key=orders.get) in ("holds", "wrong without an attack")


def test_the_gallery_stays_small(trained, view_of, monkeypatch):
    monkeypatch.setattr("atas.report.sections.examples._MAX_PICTURE_BYTES", 10_000)
    cards = gallery_section(view_of(trained)).context["gallery"].cards
    assert 0 < len(cards) < 24


def test_without_pictures_the_reason_is_told(make_run, copy_of, view_of):
    older = view_of(make_run("older", right={"clean": 90, "pgd50": 60}))
    for section, key in ((gallery_section, "gallery"), (surface_section, "surfaces"), (classes_section, "by_class")):
        found = section(older).context[key]
        assert isinstance(found, Unavailable)
        assert "evaluate again" in str(found)
    view = view_of(copy_of())
    details = dataclasses.replace(view.evaluation.details, examples=None, landscapes=None)
    view.summary = dataclasses.replace(view.summary, evaluation=dataclasses.replace(view.evaluation, details=details))
    assert "depend on chance" in str(gallery_section(view).context["gallery"])
    assert "too slow" in str(surface_section(view).context["surfaces"])


# Step sizes and norms


def test_extremes_and_deciles_are_those_of_the_training(trained, view_of):
    view = view_of(trained)
    stored, extremes = view.training_examples, gallery_section(view).context["extremes"]
    assert (extremes.count, len(extremes.largest), len(extremes.smallest)) == (1297, 8, 8)
    assert extremes.largest[0].text.startswith(f"{float(stored.norms[0]):.3g}, step ")
    chart = steps_section(view).context["accuracy"]
    clean, robust = chart.lines
    assert clean.values == [100 * right / count for count, right, _ in stored.deciles.tolist()]
    assert robust.values == [100 * right / count for count, _, right in stored.deciles.tolist()]
    (band,) = chart.ranges
    assert all(low <= share <= high for low, share, high in zip(band.low, robust.values, band.high, strict=True))
    assert f"on {int(stored.deciles[:, 0].sum())} training images" in chart.note


def test_methods_without_step_sizes_have_no_deciles(make_run, view_of):
    view = view_of(make_run("run", "fgsm-rs"))
    assert steps_section(view).context["accuracy"] is None
    assert gallery_section(view).context["extremes"] is None


# The loss around an image


def test_surfaces_are_the_stored_landscapes(trained, view_of):
    view = view_of(trained)
    surfaces = surface_section(view).context["surfaces"]
    landscapes = view.evaluation.details.landscapes
    assert [card.index for card in surfaces.cards] == landscapes.index.tolist()
    for card, loss in zip(surfaces.cards, landscapes.loss, strict=True):
        assert [line.values for line in card.slices.lines] == [loss[row].tolist() for row in (0, 5, 10, 15, 20)]
        assert list(card.slices.x) == pytest.approx(torch.linspace(-1, 1, GRID).tolist(), abs=1e-6)
    assert surfaces.bent == sum(map(peaks_inside, landscapes.loss))


def test_a_bent_surface():
    rising = torch.linspace(-1, 1, GRID).exp().expand(GRID, GRID)
    bump = torch.exp(-8 * (torch.linspace(-1, 1, GRID) - 0.5) ** 2).expand(GRID, GRID)
    assert not peaks_inside(rising)
    assert peaks_inside(bump)
    assert not peaks_inside(torch.zeros(GRID, GRID))


# Classes


def test_confusion_is_of_all_images_and_every_attack(trained, view_of):
    view = view_of(trained)
    context, details = classes_section(view).context, view.evaluation.details
    assert [confusion.attack for confusion in context["confusions"]] == ["clean", "fgsm", "pgd10", "apgd-ce"]
    assert context["chosen"] == "apgd-ce"
    for confusion in context["confusions"]:
        expected = [[0] * 10 for _ in range(10)]
        for label, predicted in zip(details.labels.tolist(), details.predicted[confusion.attack].tolist(), strict=True):
            expected[label][predicted] += 1
        shown = [[int(cell.text or 0) for cell in row[1:]] for row in confusion.table.rows]
        assert shown == expected
        right = sum(expected[number][number] for number in range(10))
        assert right == int(view.evaluation.correct[confusion.attack].sum())
        assert (confusion.num_images, confusion.num_nan) == (40, 0)


def test_classes_that_are_predicted_and_have_no_name():
    labels, predicted = torch.tensor([0, 1, 1, 1]), torch.tensor([2, 1, -1, 1])
    matrix = ConfusionMatrix.count(labels, predicted, ("a", "b", "class 2"))
    assert matrix.counts.tolist() == [[0, 0, 1], [0, 2, 0], [0, 0, 0]]
    assert matrix.top_mistakes(3) == [("a", "class 2", 1, 1)]


def test_the_most_frequent_mistakes():
    found = ConfusionMatrix(torch.tensor([[5, 2, 0], [1, 0, 4], [0, 0, 9]]), ("a", "b", "c"))
    assert found.top_mistakes(2) == [("b", "c", 4, 5), ("a", "b", 2, 7)]
    assert len(found.top_mistakes(100)) == 3


def test_pictures_name_the_attack_that_made_them(healthy_page):
    """A card says what broke its image first, whichever attack is chosen."""
    page = healthy_page.read_text(encoding="utf-8")
    captions = re.findall(r'<figure data-attack="([^"]+)"[^>]*>\s*<img[^>]*>\s*<figcaption>([^<]*)</figcaption>', page)
    assert {attack for attack, _ in captions} == {"fgsm", "pgd10", "apgd-ce"}
    for attack, caption in captions:
        assert caption == f"by {display_name(attack)}"
    reasons = set(re.findall(r'<span class="reason">([^<]*)</span>', page))
    assert "first broken by FGSM" in reasons
    assert all(text.startswith("first broken by ") for text in reasons - {"holds", "wrong without an attack"})


def test_a_surface_is_of_the_image_beside_it(trained, view_of):
    view = view_of(trained)
    cards = {card.index: card for card in gallery_section(view).context["gallery"].cards}
    surfaces = surface_section(view).context["surfaces"].cards
    assert surfaces
    for surface in surfaces:
        assert surface.image.src == cards[surface.index].image.src
        assert surface.class_name == cards[surface.index].class_name


def test_a_map_has_its_first_row_at_the_bottom():
    picture = heat_map(torch.tensor([[0.0, 0.0], [1.0, 2.0]]), 2.0, "a map")
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(picture.src.partition(",")[2]))).convert("L"))
    assert pixels[1].tolist() == [pixels.min()] * 2
    assert pixels[1, 0] < pixels[0, 0] < pixels[0, 1]


def test_intervals_of_classes_and_stages_are_their_own(trained, view_of):
    view = view_of(trained)
    evaluation, labels = view.evaluation, view.evaluation.details.labels
    rows = classes_section(view).context["by_class"].cells
    assert len(rows) == 10
    for row in rows:
        members = labels == int(row[0].text)
        count, n = int(evaluation.correct["worst"][members].sum()), int(members.sum())
        assert (row[1].text, row[-3].text) == (str(n), f"{100 * count / n:.1f}")
        assert row[-2].text == format_interval(wilson(count, n))
        assert row[-1].whisker.value == count / n
    stages = (Stage("apgd-ce", 30, 40, 1.0, 1), Stage("square", 20, 40, 1.0, 1))
    view.summary = dataclasses.replace(
        view.summary, evaluation=dataclasses.replace(evaluation, stages={"apgd-ce": stages})
    )
    table = summary_section(view, None).context["accuracy"]
    shown = [row for row in table.cells if row[0].class_ == "stage"]
    for stage, row in zip(stages, shown, strict=True):
        assert row[1].text == f"{100 * stage.num_correct / 40:.1f}"
        assert row[2].text == format_interval(wilson(stage.num_correct, 40))
        assert row[3].whisker.interval == wilson(stage.num_correct, 40)


@pytest.mark.parametrize(("second", "word"), [((50, 65), "Not shown"), ((50, 58), "Yes, over these seeds")])
def test_a_lead_over_seeds_is_real_if_the_ranges_are_apart(make_run, second, word):
    """Whatever the means are."""
    for name, counts in (("first", (60, 72)), ("second", second)):
        for seed, count in enumerate(counts):
            folder = make_run(f"{name}/seed-{seed}", right={"clean": 90, "pgd50": count})
    groups = [folder.parents[1] / name for name in ("second", "first")]
    paths = run_folders(groups)
    views = [RunView(run, path) for run, path in zip(report.summarise(paths), paths, strict=True)]
    which, real, _ = seeds_section(summarise_groups(groups), views).context["answers"]
    assert which.word == "first"
    assert real.word == word
