"""Label targets: the probabilities that the training loss compares a model's predictions with.

Without targets a method trains on the labels. `LabelTargets` softens them. `RememberedPredictions` also mixes in what
the model has predicted for the example so far, a moving average that is kept beside its perturbation:

    target     = (1 - share) softened label + share average
    average   <- decay average + (1 - decay) softmax(logits)

An example that was not trained on yet has its label as average. Both lines are part of `method.loss(logits, y, index)`,
so they cost no pass and need no other call. The average is read before it is updated.

Late in a training the model has memorised its labels and its robustness falls; an average of earlier predictions does
not follow there. Cross-entropy with such targets has its smallest value at the target, not at certainty.
"""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from atas.core.autograd import to_float32
from atas.core.dispatch import fast_op
from atas.core.rng import CounterRNG, Stream
from atas.errors import UsageError, unknown

Noise: TypeAlias = Literal["uniform", "random"]

_MANY_CLASSES = 100  # with more of them, averages are float16: half of 5 GB for ImageNet


class LabelTargets(nn.Module):
    """Labels with smoothing: the share `smoothing` of the probability is spread over the classes.

    With noise `uniform` every class gets an equal part of it, the true one too, as with PyTorch's `label_smoothing`.
    With `random` the other classes share it by weights that are uniform in (0, 1), new in every epoch for every example
    (LIET).

    >>> targets = LabelTargets(smoothing=0.4)
    >>> rng = CounterRNG(0, torch.tensor(0), torch.tensor([7]))
    >>> targets(torch.zeros(1, 4), torch.tensor([2]), torch.tensor([7]), rng).round(decimals=4).tolist()
    [[0.1, 0.1, 0.7, 0.1]]
    """

    has_rows: ClassVar[bool] = False  # True if there is state for each example

    def __init__(self, *, smoothing: float = 0.0, noise: Noise = "uniform") -> None:
        super().__init__()
        if not 0 <= smoothing < 1:
            raise UsageError(f"smoothing is a share of the probability in [0, 1); got {smoothing}")
        if noise not in get_args(Noise):
            raise unknown("noise of the targets", noise, get_args(Noise))
        self.smoothing, self.noise = smoothing, noise

    def setup(self, examples: int, device: torch.device | str | None) -> None:
        """Create the state for this many examples; called by the method that takes these targets."""

    def forward(self, logits: Tensor, y: Tensor, index: Tensor, rng: CounterRNG) -> Tensor:
        """Return the targets of a batch: a distribution over the classes for each example."""
        labels = one_hot(y, logits.shape[1], to_float32(logits).dtype)
        if not self.smoothing:
            return labels
        if self.noise == "uniform":
            spread = torch.full_like(labels, 1 / logits.shape[1])
        else:
            weights = rng.uniform(Stream.TARGET, (logits.shape[1],)).to(labels.dtype) * (1 - labels)
            spread = weights / weights.sum(1, keepdim=True)
        return (1 - self.smoothing) * labels + self.smoothing * spread

    def remember(self, logits: Tensor, y: Tensor, index: Tensor) -> None:
        """Update the state with the predictions of a batch; smoothing has none."""


class RememberedPredictions(LabelTargets):
    """Labels mixed with a moving average of what the model predicted for each example where it was trained.

    `share` is the weight of the average in the target from `from_epoch` on, counted from 0; it is updated from the
    first epoch. Further arguments are those of `LabelTargets`. The loss of a training step updates the averages of its
    examples. A method that evaluates its loss several times in a step (`free`, `yopo`) updates them as often.

    >>> targets = RememberedPredictions(classes=10, share=0.4, decay=0.7)
    >>> from atas import ATAS, Linf
    >>> method = ATAS(Linf(8/255), examples=100, shape=(3, 32, 32), targets=targets)
    >>> tuple(method.targets.average.shape)
    (100, 10)
    """

    has_rows = True
    average: Tensor

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
            raise UsageError(
                f"remembered predictions need classes >= 2, 0 <= share <= 1, 0 <= decay < 1 and from_epoch >= 0; got "
                f"{classes=}, {share=}, {decay=}, {from_epoch=}"
            )
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
                f"create the targets with classes={logits.shape[1]}"
            )
        labels = super().forward(logits, y, index, rng)
        share = self.share * (rng.epoch >= self.from_epoch).to(labels.dtype)
        return (1 - share) * labels + share * self._average_of(y, index).to(labels.dtype)

    def remember(self, logits: Tensor, y: Tensor, index: Tensor) -> None:
        """Update the averages of these examples."""
        average = self._average_of(y, index)
        predicted = to_float32(logits).softmax(1).to(average.dtype)
        self.average[index] = (self.decay * average + (1 - self.decay) * predicted).to(self.average.dtype)

    def _average_of(self, y: Tensor, index: Tensor) -> Tensor:
        """Return the averages as distributions: float16 rows do not add up to one exactly."""
        rows = self.average[index]
        rows = rows.float() if rows.dtype == torch.float16 else rows
        total = rows.sum(1, keepdim=True)
        seen = total > 0
        return torch.where(seen, rows / torch.where(seen, total, 1), one_hot(y, self.classes, rows.dtype))


def one_hot(y: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
    """Return labels as distributions; unlike `F.one_hot` it never waits for the device."""
    return (y[:, None] == torch.arange(classes, device=y.device)).to(dtype)


def create(
    classes: int, *, smoothing: float, noise: Noise, share: float, decay: float, from_epoch: int
) -> LabelTargets | None:
    """Return the simplest targets with these settings; None for the labels themselves."""
    if share:
        return RememberedPredictions(
            classes, share=share, decay=decay, from_epoch=from_epoch, smoothing=smoothing, noise=noise
        )
    return LabelTargets(smoothing=smoothing, noise=noise) if smoothing else None


@fast_op
def make_targets(
    targets: LabelTargets, logits: Tensor, y: Tensor, index: Tensor, rng: CounterRNG, remember: bool
) -> Tensor:
    """Return the targets of a batch; `remember` then updates their state with these predictions.

    The logits are detached: compiled together with the loss, its backward pass would read the updated state.
    """
    probabilities = targets(logits, y, index, rng)
    if remember:
        targets.remember(logits, y, index)
    return probabilities
