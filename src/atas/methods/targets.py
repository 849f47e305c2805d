"""Label targets: the probabilities that the training loss compares a model's predictions with.

Without targets a method trains on the labels. `LabelTargets` softens them. `RememberedPredictions` also mixes in what
the model has predicted for the example so far, a moving average that is kept beside its perturbation:

    target     = (1 - share) softened label + share average
    average   <- decay average + (1 - decay) softmax(logits)

An example that was not trained on yet has its label as average. `method.loss(logits, y, index)` does both, in this
order, so targets need no other call and no pass. Late in a training a model memorises its labels and loses robustness;
an average of earlier predictions does not follow there.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from atas.core.arguments import check_arguments
from atas.core.autograd import to_float32
from atas.core.dispatch import fast_op
from atas.core.rng import CounterRNG, Stream
from atas.errors import UsageError
from atas.methods.checks import known_epochs

Noise: TypeAlias = Literal["uniform", "others", "random"]
_MANY_CLASSES = 100  # with more of them, averages are float16: 2.6 GB for ImageNet


class LabelTargets(nn.Module):
    """Labels with smoothing: the share `smoothing` of the probability is spread over the classes.

    With noise `uniform` every class gets an equal part, the true one too, as in PyTorch. With `others` the others share
    it equally, and with `random` by weights in (0, 1), new in every epoch for every example (LIET).

    >>> targets = LabelTargets(smoothing=0.4)
    >>> rng = CounterRNG(0, torch.tensor(0), torch.tensor([7]))
    >>> targets(torch.zeros(1, 4), torch.tensor([2]), torch.tensor([7]), rng)
    tensor([[0.1000, 0.1000, 0.7000, 0.1000]])
    """

    @check_arguments
    def __init__(self, *, smoothing: float = 0.0, noise: Noise = "uniform") -> None:
        super().__init__()
        if not 0 <= smoothing < 1:
            raise UsageError(f"smoothing is a share of the probability in [0, 1); got {smoothing}")
        self.smoothing, self.noise = smoothing, noise

    def setup(self, examples: int, device: torch.device | str | None) -> None:
        """Create the state of this many examples; called by the method that takes these targets."""

    def start_epoch(self, epoch: int, epochs: int | None) -> None:
        """Called by the method when an epoch starts."""

    def forward(self, logits: Tensor, y: Tensor, index: Tensor, rng: CounterRNG) -> Tensor:
        """Return the targets of a batch: a distribution over the classes for each example."""
        labels = _one_hot(y, to_float32(logits))
        spread: Tensor | float = 1 / logits.shape[1]
        if self.noise != "uniform" and self.smoothing:
            weights = 1 - labels
            if self.noise == "random":
                weights = weights * rng.uniform(Stream.TARGET, (logits.shape[1],)).to(labels.dtype)
            spread = weights / weights.sum(1, keepdim=True)
        return (1 - self.smoothing) * labels + self.smoothing * spread

    def teach(self, teacher: nn.Module, x: Tensor) -> AbstractContextManager[None]:
        """Return a context for the losses of these clean images; only targets from a teacher ask it."""
        return nullcontext()

    def remember(self, logits: Tensor, y: Tensor, index: Tensor) -> None:
        """Update the state with the predictions of a batch; smoothing has none."""


class RememberedPredictions(LabelTargets):
    """Labels mixed with a moving average of what the model predicted for each example where it was trained.

    `share` is the weight of the average in the target from `from_epoch` on, counted from 0; it is updated from the
    first epoch. A method that evaluates its loss several times in a step (`free`, `yopo`) updates it as often.

    >>> targets = RememberedPredictions(classes=10, share=0.4, decay=0.7)
    >>> from atas import ATAS, Linf
    >>> method = ATAS(Linf(8/255), examples=100, shape=(3, 32, 32), targets=targets)
    >>> tuple(method.targets.average.shape)
    (100, 10)
    """

    average: Tensor

    @check_arguments
    def __init__(
        self,
        classes: int,
        *,
        share: float = 0.4,
        decay: float = 0.7,
        from_epoch: int = 0,
        smoothing: float = 0.0,
        noise: Noise = "uniform",
    ) -> None:
        super().__init__(smoothing=smoothing, noise=noise)
        if classes < 2 or not 0 <= share <= 1 or not 0 <= decay < 1 or from_epoch < 0:
            given = f"{classes=}, {share=}, {decay=}, {from_epoch=}"
            needs = "classes >= 2, 0 <= share <= 1, 0 <= decay < 1 and from_epoch >= 0"
            raise UsageError(f"remembered predictions need {needs}; got {given}")
        self.classes, self.share, self.decay, self.from_epoch = classes, share, decay, from_epoch

    def setup(self, examples: int, device: torch.device | str | None) -> None:
        """Allocate a row for every example; zeros stand for an example that was not trained on yet."""
        if hasattr(self, "average"):
            raise UsageError("these targets belong to a method already; create new ones for another method")
        dtype = torch.float16 if self.classes > _MANY_CLASSES else torch.float32
        self.register_buffer("average", torch.zeros(examples, self.classes, dtype=dtype, device=device))

    def forward(self, logits: Tensor, y: Tensor, index: Tensor, rng: CounterRNG) -> Tensor:
        """Return the softened labels mixed with the averages."""
        if logits.shape[1] != self.classes:
            raise UsageError(
                f"the model has {logits.shape[1]} outputs, and predictions of {self.classes} classes are remembered; "
                f"pass classes={logits.shape[1]} to the method or its targets"
            )
        labels = super().forward(logits, y, index, rng)
        share = self.share * (rng.epoch >= self.from_epoch).to(labels.dtype)
        return (1 - share) * labels + share * self._average_of(y, index).to(labels.dtype)

    def remember(self, logits: Tensor, y: Tensor, index: Tensor) -> None:
        """Update the averages of these examples."""
        predicted = to_float32(logits).softmax(1)
        average = self.decay * self._average_of(y, index) + (1 - self.decay) * predicted
        self.average[index] = average.to(self.average.dtype)

    def _average_of(self, y: Tensor, index: Tensor) -> Tensor:
        """Return the averages as distributions: float16 rows do not add up to one exactly."""
        rows = to_float32(self.average[index])
        total = rows.sum(1, keepdim=True)
        return torch.where(total > 0, rows / torch.where(total > 0, total, 1), _one_hot(y, rows))


class RelaxedLabels(LabelTargets):
    """Labels that relax from epoch to epoch: the true class keeps s = max(factor tan(1 - e / E), floor) in epoch e of E
    (TDAT). Training spreads the rest over all classes, as smoothing by 1 - s does."""

    kept: Tensor

    @check_arguments
    def __init__(self, *, factor: float, floor: float) -> None:
        super().__init__()
        if not 0 < floor <= 1 or not 0 <= factor <= 1 / math.tan(1):
            raise UsageError(f"labels relax by a factor in [0, 0.642] to a floor in (0, 1]; got {factor=}, {floor=}")
        self.factor, self.floor = factor, floor

    def setup(self, examples: int, device: torch.device | str | None) -> None:
        """Create the share of an epoch, which follows from its number and is no part of the state."""
        self.register_buffer("kept", torch.ones((), device=device), persistent=False)

    def start_epoch(self, epoch: int, epochs: int | None) -> None:
        """Set the share of this epoch."""
        passed = epoch / known_epochs("a method whose labels relax", epochs)
        self.kept.fill_(max(self.factor * math.tan(1 - passed), self.floor))

    def forward(self, logits: Tensor, y: Tensor, index: Tensor, rng: CounterRNG) -> Tensor:
        """Return the targets of the training loss."""
        return self.kept * _one_hot(y, to_float32(logits)) + (1 - self.kept) / logits.shape[1]

    def of_attack(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the targets of the attack, which spread the rest over the other classes alone."""
        labels = _one_hot(y, to_float32(logits))
        return self.kept * labels + (1 - self.kept) / (logits.shape[1] - 1) * (1 - labels)


def _one_hot(y: Tensor, like: Tensor) -> Tensor:
    """Return labels as distributions; unlike `F.one_hot` it never waits for the device."""
    return (y[:, None] == torch.arange(like.shape[1], device=y.device)).to(like.dtype)


@fast_op
def make_targets(
    targets: LabelTargets, logits: Tensor, y: Tensor, index: Tensor, rng: CounterRNG, remember: bool
) -> Tensor:
    """Return the targets of a batch, and `remember` these predictions. The logits are detached: compiled together with
    the loss, the loss's backward pass would read the updated state."""
    probabilities = targets(logits, y, index, rng)
    if remember:
        targets.remember(logits, y, index)
    return probabilities
