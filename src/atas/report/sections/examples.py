"""Example images: before and after each attack, at both ends of the gradient norm, and the loss around a few.

All of them were stored by the evaluation and by the training.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from atas.attacks.registry import display_name
from atas.core.thumbnails import GREY
from atas.evaluation import Evaluation, EvaluationDetails, ExampleImages, LossLandscapes
from atas.evaluation.details import GRID
from atas.report.charts import Chart, ChartLine
from atas.report.elements import Section, Unavailable
from atas.report.formatting import attack_names, describe_outcome
from atas.report.images import Picture, heat_map, image
from atas.report.run_view import RunView
from atas.threat import Threat
from atas.training.examples import TrainingExamples

_MAX_PICTURE_BYTES = 2_500_000
_MIN_COLOUR_LIMIT = 1.0  # a flat surface must not look steep
_OFFSETS = ((0, "r0"), (GRID // 4, "r2"), (GRID // 2, "c7"), (GRID - 1 - GRID // 4, "r7"), (GRID - 1, "r9"))


@dataclass(frozen=True)
class AttackVariant:
    """One attack on one image. The pictures are None where the attack changed nothing."""

    attack: str
    title: str
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
    """Cards, and the attacks to choose from (name: title)."""

    cards: list[ExampleCard]
    attacks: dict[str, str]
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
    examples = view.training_examples
    context = {"gallery": _gallery_of(view), "extremes": None if examples is None else _norm_extremes(examples)}
    return Section("gallery", "What the attacks do", "gallery", context)


def _gallery_of(view: RunView) -> Gallery | Unavailable:
    stored = view.details
    if isinstance(stored, Unavailable):
        return stored
    evaluation, details = stored
    if details.examples is None:
        return Unavailable("No images are stored: verdicts of this model or attack depend on chance")
    return _gallery(evaluation, details, details.examples)


def _gallery(evaluation: Evaluation, details: EvaluationDetails, examples: ExampleImages) -> Gallery:
    cards: list[ExampleCard] = []
    bytes_left = _MAX_PICTURE_BYTES
    for row in range(len(examples.index)):
        card = _example_card(evaluation, details, examples, row)
        bytes_left -= card.num_bytes
        if bytes_left < 0:
            break
        cards.append(card)
    attacks = {name: display_name(name) for name in _shown_attacks(evaluation, examples)}
    return Gallery(cards, attacks, evaluation.threat)


def _shown_attacks(evaluation: Evaluation, examples: ExampleImages) -> list[str]:
    return [name for name in attack_names(evaluation) if name in examples.attacks]


def _example_card(evaluation: Evaluation, details: EvaluationDetails, examples: ExampleImages, row: int) -> ExampleCard:
    index = int(examples.index[row])
    label, clean, reason = int(details.labels[index]), examples.attacks["clean"], _broken_by(evaluation, index)
    name = details.class_name(label)
    outcomes = _outcomes(evaluation)
    return ExampleCard(
        index=index,
        label=label,
        class_name=name,
        outcome=describe_outcome(reason),
        order=outcomes.index(reason) if reason in outcomes else len(outcomes),
        robust=reason is None,
        correct=int(clean.label[row]) == label,
        prediction=_prediction_text(details, int(clean.label[row]), float(clean.confidence[row])),
        image=image(clean.adversarial[row], f"test image {index}, class {name}"),
        variants=[
            _variant(evaluation, details, examples, attack, row) for attack in _shown_attacks(evaluation, examples)
        ],
    )


def _variant(
    evaluation: Evaluation, details: EvaluationDetails, examples: ExampleImages, attack: str, row: int
) -> AttackVariant:
    images, robust = examples.attacks[attack], bool(evaluation.correct[attack][examples.index[row]])
    confidence, title = float(images.confidence[row]), display_name(attack)
    prediction = _prediction_text(details, int(images.label[row]), confidence)
    changed, after = None, None
    if bool((images.perturbation[row] != GREY).any()):
        changed = image(images.perturbation[row], f"perturbation by {title}")
        after = image(images.adversarial[row], f"the image after {title}: the model predicts {prediction}")
    return AttackVariant(attack, title, robust, confidence, prediction, changed, after)


def _broken_by(evaluation: Evaluation, index: int) -> str | None:
    """Return what broke an example; by attack where the result does not say more."""
    if "worst" in evaluation.broken_by:
        return evaluation.broken_by["worst"][index]
    return next((name for name in ("clean", *attack_names(evaluation)) if not evaluation.correct[name][index]), None)


def _outcomes(evaluation: Evaluation) -> list[str | None]:
    """Return all outcomes: attacks and stages in the order in which they ran, then None (robust) and `clean`."""
    outcomes: list[str | None] = []
    for name in attack_names(evaluation):
        outcomes += [f"{name}: {stage.name}" for stage in evaluation.stages.get(name, ())] or [name]
    return [*outcomes, None, "clean"]


def _prediction_text(details: EvaluationDetails, label: int, confidence: float) -> str:
    return f"{details.class_name(label)} {100 * confidence:.0f}%"


def _norm_extremes(examples: TrainingExamples) -> NormExtremes:
    found = [_norm_example(examples, row) for row in range(len(examples.index))]
    half = len(found) // 2
    return NormExtremes(examples.count, found[:half], found[half:])


def _norm_example(examples: TrainingExamples, row: int) -> NormExample:
    index, norm, size = (float(values[row]) for values in (examples.index, examples.norms, examples.step_sizes))
    name = examples.classes[int(examples.labels[row])]
    picture = image(examples.images[row], f"training image {index:.0f}, class {name}, norm {norm:.3g}")
    return NormExample(name, f"{norm:.3g}, step {size:.3g}", picture)


def surface_section(view: RunView) -> Section:
    """Return a map of the loss and slices through it, for each of a few images."""
    return Section("surface", "The loss around an image", "surface", {"surfaces": _surfaces_of(view)})


def _surfaces_of(view: RunView) -> Surfaces | Unavailable:
    stored = view.details
    if isinstance(stored, Unavailable):
        return stored
    evaluation, details = stored
    if details.landscapes is None or details.examples is None:
        if not attack_names(evaluation):
            return Unavailable("No attack was run")
        return Unavailable("No image was classified correctly, or the network was too slow for the device")
    return _surfaces(evaluation, details, details.examples, details.landscapes)


def _surfaces(
    evaluation: Evaluation, details: EvaluationDetails, examples: ExampleImages, landscapes: LossLandscapes
) -> Surfaces:
    limit = max(_MIN_COLOUR_LIMIT, float(landscapes.loss.max()))
    cards = []
    for index, loss in zip(landscapes.index.tolist(), landscapes.loss, strict=True):
        pixels = examples.attacks["clean"].adversarial[examples.index == index][0]
        cards.append(_surface_card(index, details.class_name(int(details.labels[index])), pixels, loss, limit))
    return Surfaces(cards, sum(peaks_inside(loss) for loss in landscapes.loss), evaluation.threat)


def peaks_inside(loss: Tensor) -> bool:
    """Return whether the loss along the adversarial direction is highest well inside the ball, not at its edge."""
    along = loss[GRID // 2, GRID // 2 :]
    return bool(along[:-2].max() > along[-1] + 0.1 * (along.max() - along[0]))


def _surface_card(index: int, name: str, pixels: Tensor, loss: Tensor, limit: float) -> SurfaceCard:
    steps = [round(2 * point / (GRID - 1) - 1, 6) for point in range(GRID)]
    low, high = float(loss.min()), float(loss.max())
    slices = Chart(
        f"Slices through no. {index}",
        "adversarial direction, of the budget",
        "loss",
        steps,
        [
            ChartLine(f"{steps[row]:+.1f}" if row != GRID // 2 else "0", loss[row].tolist(), colour)
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
