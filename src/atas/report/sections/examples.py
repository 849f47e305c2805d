"""Example images: before and after each attack, at both ends of the gradient norm, and the loss around a few."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from atas.attacks.registry import display_name
from atas.report.attack_examples import AttackedExamples, AttackResult, attack_examples, sample_by_outcome
from atas.report.charts import Chart, ChartLine
from atas.report.elements import Section
from atas.report.formatting import describe_outcome, join_names
from atas.report.images import Picture, heat_map, image, perturbation
from atas.report.measurements import POINTS, ExampleNorms, LossLandscape, gradient_norms, loss_landscape
from atas.report.run_view import RunView, evenly_spaced, or_unavailable
from atas.threat import Threat

_NUM_EXTREMES = 8
_MAX_PICTURE_BYTES = 2_500_000
_NUM_SURFACES = 3
_MIN_COLOUR_LIMIT = 1.0  # a flat surface must not look steep
_OFFSETS = ((0, "r0"), (POINTS // 4, "r2"), (POINTS // 2, "c7"), (POINTS - 1 - POINTS // 4, "r7"), (POINTS - 1, "r9"))


@dataclass(frozen=True)
class AttackVariant:
    """One attack on one image. The pictures are None where the attack changed nothing."""

    attack: str
    robust: bool
    confidence: float
    prediction: str
    perturbation: Picture | None
    adversarial: Picture | None

    @property
    def num_bytes(self) -> int:
        """Size of the pictures in the page."""
        return sum(len(picture.src) for picture in (self.perturbation, self.adversarial) if picture is not None)


@dataclass(frozen=True)
class ExampleCard:
    """One test image, its prediction, and every attack on it."""

    index: int
    label: int
    class_name: str
    outcome: str
    order: int
    robust: bool
    correct: bool
    prediction: str
    image: Picture
    variants: list[AttackVariant]

    @property
    def num_bytes(self) -> int:
        """Size of the pictures in the page."""
        return len(self.image.src) + sum(variant.num_bytes for variant in self.variants)


@dataclass(frozen=True)
class Gallery:
    """Cards, the attacks to choose from (name: title), and attacks that were skipped."""

    cards: list[ExampleCard]
    attacks: dict[str, str]
    skipped: str
    threat: Threat


@dataclass(frozen=True)
class NormExample:
    """A training image with its gradient norm and step size as text."""

    class_name: str
    text: str
    image: Picture


@dataclass(frozen=True)
class NormExtremes:
    """Training images with the largest and the smallest gradient norms."""

    count: int
    source: str
    largest: list[NormExample]
    smallest: list[NormExample]


@dataclass(frozen=True)
class SurfaceCard:
    """The loss around one image, as a map and as slices."""

    index: int
    class_name: str
    image: Picture
    map: Picture
    caption: str
    slices: Chart


@dataclass(frozen=True)
class Surfaces:
    """Cards, and how many of them have their highest loss inside the ball."""

    cards: list[SurfaceCard]
    bent: int
    threat: Threat


def gallery_section(view: RunView) -> Section:
    """Return the gallery of attacks, and training examples by gradient norm."""
    context = {
        "gallery": or_unavailable(lambda: _gallery(attack_examples(view))),
        "extremes": or_unavailable(lambda: _norm_extremes(view)),
    }
    return Section("gallery", "What the attacks do", "gallery", context)


def _gallery(examples: AttackedExamples) -> Gallery:
    cards: list[ExampleCard] = []
    bytes_left = _MAX_PICTURE_BYTES
    for row in range(len(examples.index)):
        card = _example_card(examples, row)
        bytes_left -= card.num_bytes
        if bytes_left < 0:
            break
        cards.append(card)
    attacks = {result.name: display_name(result.name) for result in examples.results}
    return Gallery(cards, attacks, join_names(examples.skipped) if examples.skipped else "", examples.threat)


def _example_card(examples: AttackedExamples, row: int) -> ExampleCard:
    index, label = examples.index[row], examples.labels[row]
    predicted = examples.clean.label[row]
    name = _class_name(examples, label)
    return ExampleCard(
        index=index,
        label=label,
        class_name=name,
        outcome=describe_outcome(examples.broken_by[row]),
        order=examples.outcome_order(row),
        robust=examples.broken_by[row] is None,
        correct=predicted == label,
        prediction=_prediction_text(examples, predicted, examples.clean.confidence[row]),
        image=image(examples.images[row], f"test image {index}, class {name}"),
        variants=[_variant(examples, row, result) for result in examples.results],
    )


def _variant(examples: AttackedExamples, row: int, result: AttackResult) -> AttackVariant:
    delta = result.adversarial[row] - examples.images[row]
    confidence = result.prediction.confidence[row]
    prediction = _prediction_text(examples, result.prediction.label[row], confidence)
    changed, after = None, None
    if bool(delta.any()):
        attack = display_name(result.name)
        changed = perturbation(delta, f"perturbation by {attack}")
        after = image(result.adversarial[row], f"the image after {attack}: the model predicts {prediction}")
    return AttackVariant(result.name, result.robust[row], confidence, prediction, changed, after)


def _prediction_text(examples: AttackedExamples, label: int, confidence: float) -> str:
    return f"{_class_name(examples, label)} {100 * confidence:.0f}%"


def _class_name(examples: AttackedExamples, label: int) -> str:
    return examples.classes[label] if label < len(examples.classes) else f"class {label}"


def _norm_extremes(view: RunView) -> NormExtremes:
    norms = gradient_norms(view)
    order = norms.norm.argsort(stable=True)
    largest, smallest = (
        [_norm_example(view, norms, row) for row in rows.tolist()]
        for rows in (order.flip(0)[:_NUM_EXTREMES], order[:_NUM_EXTREMES])
    )
    return NormExtremes(len(order), norms.source, largest, smallest)


def _norm_example(view: RunView, norms: ExampleNorms, row: int) -> NormExample:
    train, index, norm = view.data.train, int(norms.index[row]), float(norms.norm[row])
    name = train.classes[int(train.labels[index])]
    step = "" if norms.step_size is None else f", step {float(norms.step_size[row]):.3g}"
    picture = image(train.images[index].float() / 255, f"training image {index}, class {name}, norm {norm:.3g}")
    return NormExample(name, f"{norm:.3g}{step}", picture)


def surface_section(view: RunView) -> Section:
    """Return a map of the loss and slices through it, for each of a few images."""
    context = {"surfaces": or_unavailable(lambda: _surfaces(view))}
    return Section("surface", "The loss around an image", "surface", context)


def _surfaces(view: RunView) -> Surfaces:
    test, device = view.data.test, view.device
    chosen = _correct_examples(view)
    threat = view.evaluation.threat if view.evaluation is not None else view.recipe.threat
    x, y = test.images[torch.tensor(chosen)].to(device).float() / 255, test.labels[chosen].to(device).long()
    landscapes = [
        loss_landscape(view.model, x[row : row + 1], y[row : row + 1], threat, index=index)
        for row, index in enumerate(chosen)
    ]
    limit = max(_MIN_COLOUR_LIMIT, *(float(landscape.loss.max()) for landscape in landscapes))
    cards = [
        _surface_card(index, test.classes[int(y[row])], x[row], landscapes[row], limit)
        for row, index in enumerate(chosen)
    ]
    return Surfaces(cards, sum(landscape.peaks_inside for landscape in landscapes), threat)


def _correct_examples(view: RunView) -> list[int]:
    """Choose images that the model classifies correctly without an attack, with different outcomes if evaluated."""
    test = view.data.test
    if view.evaluation is not None:
        outcomes = view.test_split[0].broken_by.get("worst")
        if outcomes is not None:
            correct = [index for index, outcome in enumerate(outcomes) if outcome != "clean"]
            sample = sample_by_outcome([outcomes[index] for index in correct], _NUM_SURFACES)
            return [correct[row] for row in sample] or [0]
    candidates = evenly_spaced(len(test), 10 * _NUM_SURFACES)
    with torch.no_grad():
        predicted = view.model(test.images[candidates].to(view.device).float() / 255).argmax(1).cpu()
    good = candidates[predicted == test.labels[candidates]]
    return good[evenly_spaced(len(good), _NUM_SURFACES)].tolist() if len(good) else [0]


def _surface_card(index: int, name: str, pixels: Tensor, landscape: LossLandscape, limit: float) -> SurfaceCard:
    steps, loss = landscape.steps, landscape.loss
    low, high = float(loss.min()), float(loss.max())
    slices = Chart(
        f"Slices through no. {index}",
        "adversarial direction, of the budget",
        "loss",
        steps,
        [
            ChartLine(f"{steps[row]:+.1f}" if row != POINTS // 2 else "0", loss[row].tolist(), colour)
            for row, colour in _OFFSETS
        ],
        limits=(0, 1.05 * limit),
        digits=2,
        note="One line for each position along the random direction.",
    )
    return SurfaceCard(
        index,
        name,
        image(pixels, f"test image {index}"),
        heat_map(loss, limit, f"Loss around test image {index}, class {name}: from {low:.2f} to {high:.2f}"),
        f"Loss {low:.2f} to {high:.2f}; colours from 0 (dark) to {limit:.2f} (light)",
        slices,
    )
