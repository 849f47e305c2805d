"""The pictures of an evaluation: examples of every outcome under every attack, and the loss around a few of them.

While the attacks run, an `ExampleRecorder` keeps what they find for a fixed sample of the examples. At the end
`collect_details` chooses examples of every outcome. What the recorder does not hold, because the outcome is rare or the
evaluation was resumed, is searched for again: with the same attack, seed and model, on these few examples alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from atas.attacks import Attack, Clean, StagedAttack
from atas.attacks.scheduler import SearchProgress, predicted_classes
from atas.attacks.search import LogitsFunction
from atas.core.autograd import input_gradient, to_float32
from atas.core.rng import CounterRNG
from atas.core.thumbnails import perturbation_thumbnails, thumbnails
from atas.evaluation.details import (
    GRID,
    NO_CLASS,
    AttackedImages,
    EvaluationDetails,
    ExampleImages,
    LossLandscapes,
)
from atas.evaluation.outcomes import FIRST_STAGE, MISCLASSIFIED, ROBUST, AttackOutcome
from atas.evaluation.runner import EvaluationSetup, check_within_threat
from atas.threat import Threat

RECORDED_EXAMPLES = 512  # a sample of this size holds most outcomes, and takes a few MB
_NUM_EXAMPLES = 24
_NUM_LANDSCAPES = 3
_LANDSCAPE_SECONDS = 60.0  # after which no further points are computed: a slow network gets fewer landscapes
_LANDSCAPE_BATCH = 128


@dataclass(frozen=True)
class RecordedImage:
    """One example under one attack, as `AttackedImages` without the first axis."""

    adversarial: Tensor
    perturbation: Tensor
    label: int
    confidence: float


@dataclass
class ExampleRecorder:
    """Keeps the last point that each attack reached for the examples in `rows`, shrunk."""

    rows: Sequence[int]
    found: dict[tuple[str, int], RecordedImage] = field(default_factory=dict)
    """By attack and position in the data."""

    def record(self, attack: str, index: Tensor, x: Tensor, points: Tensor, logits: Tensor) -> None:
        """Keep what an attack reached for those examples that belong to the sample; `index` is on the CPU."""
        kept = torch.isin(index, torch.tensor(self.rows)).nonzero().squeeze(1)
        if not len(kept):
            return
        on_device = kept.to(x.device)
        x, points, logits = x[on_device], points[on_device], to_float32(logits[on_device])
        adversarial, perturbation = thumbnails(points).cpu(), perturbation_thumbnails(points - x).cpu()
        labels = predicted_classes(logits).tolist()
        confidence = logits.softmax(1).amax(1).nan_to_num(0).float().clamp(0, 1).tolist()
        for row, position in enumerate(index[kept].tolist()):
            self.found[attack, position] = RecordedImage(
                adversarial[row], perturbation[row], labels[row], confidence[row]
            )


def collect_details(
    setup: EvaluationSetup,
    classes: tuple[str, ...],
    outcomes: dict[str, AttackOutcome],
    broken_by: list[str | None],
    recorder: ExampleRecorder,
) -> EvaluationDetails:
    """Return predictions of all examples, and the pictures of those that are chosen.

    `broken_by` holds what broke each example first, over all attacks. Without an attack there are no landscapes.
    """
    predicted = {
        name: _predictions(outcome.code, outcome.predicted, setup.labels)
        for name, outcome in outcomes.items()
        if name in setup.attacks and outcome.predicted is not None
    }
    collector = _ExampleCollector(setup, {name: outcomes[name].code for name in setup.attacks}, recorder)
    chosen = choose_examples(broken_by, _NUM_EXAMPLES, recorder.rows)
    collector.search_again(chosen)
    chosen = [row for row in chosen if collector.shows_verdicts(row)]
    landscapes = None
    if len(setup.attacks) > 1:
        correct = [row for row in chosen if broken_by[row] != Clean.name]
        spread = choose_examples([broken_by[row] for row in correct], _NUM_LANDSCAPES)
        landscapes = _landscapes(setup, [correct[row] for row in spread])
    examples = collector.images(chosen) if chosen else None
    return EvaluationDetails(setup.labels, predicted, classes, examples, landscapes)


def choose_examples(outcomes: Sequence[str | None], count: int, preferred: Iterable[int] | None = None) -> list[int]:
    """Choose `count` examples with every outcome equally often, evenly spaced over the data.

    Of each outcome the `preferred` examples are chosen first.

    >>> choose_examples(["clean", None, None, None, "fgsm"], 4)
    [0, 1, 3, 4]
    >>> choose_examples(["clean", None, None, None, "fgsm"], 3, preferred=[2])
    [0, 2, 4]
    """
    first = set(range(len(outcomes)) if preferred is None else preferred)
    by_outcome: dict[str | None, list[int]] = {}
    for index, outcome in enumerate(outcomes):
        by_outcome.setdefault(outcome, []).append(index)
    counts = dict.fromkeys(by_outcome, 0)
    for turn in range(count):
        for outcome, indices in by_outcome.items():
            counts[outcome] += turn < len(indices) and sum(counts.values()) < count
    chosen = []
    for outcome, indices in by_outcome.items():
        for group in ([i for i in indices if i in first], [i for i in indices if i not in first]):
            taken = _evenly_spaced(group, counts[outcome])
            counts[outcome] -= len(taken)
            chosen += taken
    return sorted(chosen)


def _evenly_spaced(values: list[int], count: int) -> list[int]:
    """Return at most `count` of the values, evenly spaced, since data may be sorted by class."""
    if not values or not count:
        return []
    positions = torch.linspace(0, len(values) - 1, min(count, len(values)), dtype=torch.float64).round().long()
    return [values[position] for position in positions.tolist()]


def _predictions(code: Tensor, recorded: Tensor, labels: Tensor) -> Tensor:
    """Return predicted classes that agree with the verdicts: the label exactly where an example is robust."""
    wrong = torch.where(recorded == labels, NO_CLASS, recorded)  # a tie of two logits is wrong on some devices
    return torch.where(code == ROBUST, labels, wrong)


@dataclass(frozen=True)
class _ExampleCollector:
    """Collects the images of chosen examples: those that were recorded, and those that are searched for again."""

    setup: EvaluationSetup
    codes: dict[str, Tensor]
    """The outcome of every example, by attack."""
    recorder: ExampleRecorder

    def images(self, chosen: list[int]) -> ExampleImages:
        """Return the pictures of the examples under all attacks."""
        images = {}
        for name in self.setup.attacks:
            found = [self._recorded(name, row) for row in chosen]
            images[name] = AttackedImages(
                torch.stack([image.adversarial for image in found]),
                torch.stack([image.perturbation for image in found]),
                torch.tensor([image.label for image in found]),
                torch.tensor([image.confidence for image in found], dtype=torch.float32),
            )
        return ExampleImages(torch.tensor(chosen), images)

    def shows_verdicts(self, row: int) -> bool:
        """Return whether the pictures of an example show its verdicts.

        A search that was repeated may end differently for a random model or attack; such an example is left out.
        """
        label = int(self.setup.labels[row])
        return not self._missing(row) and all(
            (self._recorded(name, row).label == label) == (int(code[row]) == ROBUST)
            for name, code in self.codes.items()
        )

    def search_again(self, chosen: Sequence[int]) -> None:
        """Run attacks on the examples that the recorder lacks; only the stage that decided about each of them."""
        missing = {row: self._missing(row) for row in chosen}
        for name, attack in self.setup.attacks.items():
            if rows := [row for row, names in missing.items() if name in names]:
                self._attack_again(name, attack, rows)

    def _attack_again(self, name: str, attack: Attack, rows: list[int]) -> None:
        setup, again = self.setup, ExampleRecorder(rows)
        x, y, index = _read(setup, rows)
        examples = setup.scheduler.examples(x, y, index)
        x, code = examples.x, self.codes[name][index]

        def on_verified(verified: Tensor, points: Tensor, logits: Tensor) -> None:
            again.record(name, index[verified], x[verified.to(x.device)], points, logits)

        if isinstance(attack, Clean):
            again.record(name, index, x, x, examples.logits)
        elif isinstance(attack, StagedAttack):
            last = len(attack.stages) - 1
            for number, search in enumerate(attack.stages):
                needed = (code == FIRST_STAGE + number) | ((code == ROBUST) & (number == last))
                progress = SearchProgress.start(search, examples, ~needed)
                setup.scheduler.run(search, examples, setup.threat, progress, seed=setup.seed, on_verified=on_verified)
        else:
            try:
                copies = x.clone(), examples.y.clone()
                points = attack(setup.model, *copies, setup.threat, seed=setup.seed, index=examples.index)
                points = check_within_threat(points, x, setup.threat, name)
            except Exception:  # in a user's attack; it must not lose the verdicts of all examples
                return
            with torch.no_grad():
                again.record(name, index, x, points, setup.scheduler.verifier(points))
        self.recorder.found.update(again.found)

    def _missing(self, row: int) -> list[str]:
        """Return the attacks whose image of an example was not recorded."""
        found, attacks = self.recorder.found, self.setup.attacks
        return [
            name
            for name in attacks
            if (name, row) not in found and (name == Clean.name or not self._is_unchanged(name, row))
        ]

    def _recorded(self, name: str, row: int) -> RecordedImage:
        return self.recorder.found[Clean.name if self._is_unchanged(name, row) else name, row]

    def _is_unchanged(self, name: str, row: int) -> bool:
        """Return whether an attack returned the image itself: it skipped the example, or a search found nothing."""
        attack, code = self.setup.attacks[name], int(self.codes[name][row])
        failed_search = code == ROBUST and isinstance(attack, StagedAttack) and attack.skips_misclassified
        return code == MISCLASSIFIED or failed_search


def _read(setup: EvaluationSetup, rows: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return images, labels and positions of these rows."""
    images, labels = zip(*(setup.reader.read(range(row, row + 1)) for row in rows), strict=True)
    return torch.cat(images), torch.cat(labels), torch.tensor(rows)


def _landscapes(setup: EvaluationSetup, rows: list[int]) -> LossLandscapes | None:
    """Return the landscapes of as many of these examples as a minute allows; None if it allows none."""
    losses: list[Tensor] = []
    deadline = time.monotonic() + _LANDSCAPE_SECONDS
    for row in rows:
        x, y, _ = (tensor.to(setup.scheduler.device) for tensor in _read(setup, [row]))
        size = min(setup.scheduler.slots, _LANDSCAPE_BATCH)
        loss = loss_landscape(
            setup.scheduler.verifier, x, y, setup.threat, index=row, batch_size=size, deadline=deadline
        )
        if loss is None:
            break
        losses.append(loss)
    return LossLandscapes(torch.tensor(rows[: len(losses)]), torch.stack(losses)) if losses else None


def loss_landscape(
    model: LogitsFunction,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    *,
    index: int,
    batch_size: int = _LANDSCAPE_BATCH,
    deadline: float = float("inf"),
) -> Tensor | None:
    """Return the loss (21, 21) around one image (1, C, H, W); None if the clock passes the deadline.

    Columns go along a full FGSM step, rows along a random step of the same length, drawn by the image's index. Pixels
    stay in [0, 1]. The model must be in eval mode.
    """
    steps = torch.linspace(-1, 1, GRID, device=x.device, dtype=x.dtype)
    gradient, _ = input_gradient(model, x, y)
    counter = CounterRNG(0, torch.zeros((), dtype=torch.int64, device=x.device), torch.tensor([index], device=x.device))
    noise = threat.sample(counter, x.shape[1:], reset=False)
    zero = torch.zeros_like(x)
    along, aside = (threat.step(zero, way.to(x.dtype), threat.eps) for way in (gradient.nan_to_num(), noise))
    steps = steps.view(-1, 1, 1, 1)
    losses: list[Tensor] = []
    for part in torch.arange(GRID * GRID).split(batch_size):
        if time.monotonic() > deadline:
            return None
        points = (x + steps[part // GRID] * aside + steps[part % GRID] * along).clamp(0, 1)
        with torch.no_grad():
            logits = to_float32(model(points))
        losses.append(F.cross_entropy(logits, y.expand(len(points)), reduction="none"))
    return torch.cat(losses).nan_to_num(0.0, 0.0, 0.0).view(GRID, GRID).float().cpu()
