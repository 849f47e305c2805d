"""What fits into the time: epochs, size of photos, test images and attacks. Pure functions of measured costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIN_EPOCHS = 3  # fewer teach nothing
MIN_EVALUATED = 100  # test images, if there are as many
ATTACKS = (("fgsm", "pgd50", "autoattack"), ("fgsm", "pgd50", "apgd-t"), ("fgsm", "pgd50"), ("fgsm", "pgd10"))
"""The attacks to choose from, the strongest first."""

_MAX_EPOCHS = 300  # as many as the longest recipe has; small data may have more, up to _MAX_UPDATES
_MAX_UPDATES = 20_000
_SIDES = (64, 128, 224)  # to which photos are resized
_EPOCHS_FOR_SIZE = 30  # that must fit into the time before photos are made larger
_EVALUATION_SHARE, _LARGEST_EVALUATION_SHARE = 0.3, 0.4  # of the time
_OVERRUN = 1.2  # of the time, for an evaluation of the least number of images
_ASSUMED_ROBUST = 0.7  # share of the images that need all attacks, as assumed before the training
_STEP_WORK = 5  # cost of a step in forward passes: two, one backward pass to the input (1), one to the weights (2)


@dataclass(frozen=True)
class Costs:
    """Measured seconds: for a training step, for the end of an epoch (monitor, saving), for the rest of a training, and
    for a forward pass of one image in an evaluation."""

    step: float
    epoch: float
    fixed: float
    query: float


@dataclass(frozen=True)
class TrainingPlan:
    """The length of the training, and the time of the evaluation."""

    epochs: int
    epoch_seconds: float
    fixed_seconds: float
    evaluation_seconds: float
    too_short: bool
    """Whether the time is less than the smallest training takes."""
    longest: bool
    """Whether there is time for more epochs than are useful."""

    @property
    def training_seconds(self) -> float:
        """The time until the end of the training."""
        return self.seconds_for(self.epochs)

    def seconds_for(self, epochs: int) -> float:
        """Return the time until the end of a training of this many epochs."""
        return self.fixed_seconds + epochs * self.epoch_seconds


def stored_side(original: int | None) -> int:
    """Return the side in pixels of photos in a first try: 64, or that of the originals if they are smaller."""
    return _SIDES[0] if original is None else max(1, min(original, _SIDES[0]))


def larger_side(original: int | None, side: int, epoch_seconds: float, seconds: float) -> int:
    """Return the largest side of photos for which 30 epochs fit into the time, not above that of the originals.

    >>> larger_side(500, 64, epoch_seconds=2, seconds=600), larger_side(100, 64, 1, 600), larger_side(500, 64, 9, 60)
    (128, 64, 64)
    """
    fitting = [
        larger
        for larger in _SIDES
        if side < larger <= (original or side)
        and _EPOCHS_FOR_SIZE * epoch_seconds * (larger / side) ** 2 <= (1 - _EVALUATION_SHARE) * seconds
    ]
    return max(fitting, default=side)


def most_epochs(steps: int) -> int:
    """Return the largest useful number of epochs of this many steps.

    >>> most_epochs(391), most_epochs(10)
    (300, 2000)
    """
    return max(_MAX_EPOCHS, -(-_MAX_UPDATES // steps))


def affordable(seconds: float, of_image: float, least: int, most: int) -> int:
    """Return how many images a measurement of `seconds` may use, at `of_image` seconds for each.

    >>> affordable(1.0, 0.1, least=4, most=100), affordable(1.0, 1.0, 4, 100), affordable(1.0, 1e-6, 4, 100)
    (10, 4, 100)
    """
    return max(least, min(most, int(seconds / max(of_image, 1e-9))))


def takes_too_long(forward: float, images: int, seconds: float) -> bool:
    """Return whether the smallest training takes longer than the time, by the seconds of a forward pass for an image.

    >>> takes_too_long(0.1, 500, 120), takes_too_long(0.001, 500, 120)
    (True, False)
    """
    return MIN_EPOCHS * images * _STEP_WORK * forward > seconds


def plan_training(seconds: float, steps: int, costs: Costs, test_images: int, work: Sequence[float]) -> TrainingPlan:
    """Choose the number of epochs of `steps` steps, so that training and evaluation take `seconds`.

    The evaluation gets 30% of the time, up to 40% if the least number of images needs that, and less if all
    `test_images` take less. `work` is the cost of each of `ATTACKS` on a robust image, in queries.
    """
    strongest = costs.query * _ASSUMED_ROBUST * work[0]
    smallest, whole = (strongest * min(images, test_images) for images in (MIN_EVALUATED, test_images))
    share = min(max(_EVALUATION_SHARE * seconds, smallest), _LARGEST_EVALUATION_SHARE * seconds)
    evaluation = min(share, whole)
    per_epoch = steps * costs.step + costs.epoch
    fitting = int((seconds - evaluation - costs.fixed) / per_epoch)
    most = most_epochs(steps)
    epochs = min(max(fitting, MIN_EPOCHS), most)
    return TrainingPlan(epochs, per_epoch, costs.fixed, evaluation, fitting < MIN_EPOCHS, fitting > most)


def choose_attacks(
    seconds_left: float, total: float, query: float, robust: float, test_images: int, work: Sequence[float]
) -> tuple[int, tuple[str, ...]]:
    """Return the number of test images and the attacks that fit into the time left of `total` seconds.

    `robust` is the share of images that a first attack did not break. The attacks are the strongest that evaluate the
    least number of images before the total time is exceeded by a fifth.

    >>> choose_attacks(30, 100, 1e-5, 0.5, 10_000, (10_000, 2000, 100, 30))
    (600, ('fgsm', 'pgd50', 'autoattack'))
    >>> choose_attacks(30, 100, 1e-3, 0.5, 10_000, (10_000, 2000, 100, 30))[1]
    ('fgsm', 'pgd50')
    """
    least = min(MIN_EVALUATED, test_images)
    allowed = seconds_left + (_OVERRUN - 1) * total
    for attacks, queries in zip(ATTACKS, work, strict=True):
        of_image = max(query * max(robust, 1 / least) * queries, 1e-12)
        if least * of_image <= allowed:
            return max(least, int(min(max(seconds_left, 0) / of_image, test_images))), attacks
    return least, ATTACKS[-1]
