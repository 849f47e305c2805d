"""Targets from a teacher: the average of the model's weights says what a clean image looks like (ADR).

    q       = softmax(f(x; averaged weights) / temperature)     x: the clean image, as augmented
    trust   = clamp(share - (max q - q_y), 0, 1)                less where the teacher prefers another class
    target  = (1 - trust) softened label + trust q

Wu et al., "Annealing Self-Distillation Rectification Improves Adversarial Training", ICLR 2024. `share` and
`temperature` go from their first to their second value along half a cosine through the training. There, the attack
uses these targets too; here, only the training loss does. It costs one forward pass per step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from atas.core.arguments import check_arguments
from atas.core.autograd import set_mode, to_float32
from atas.core.rng import CounterRNG
from atas.errors import UsageError
from atas.methods.targets import LabelTargets, Noise

SHARE, TEMPERATURE = (0.7, 0.95), (2.5, 2.0)  # of ADR for CIFAR-10


class EMATeacher(LabelTargets):
    """Labels mixed with the predictions of averaged weights on the clean images.

    `atas.train` takes the first average of `training.ema` as the teacher. In a loop of your own, any model can teach:

    >>> from atas import ATAS, Linf
    >>> method = ATAS(Linf(8/255), examples=9, shape=(1, 2, 2), targets=EMATeacher())
    >>> method.start_epoch(0, epochs=30)
    >>> teacher = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    >>> x, y, index = torch.rand(2, 1, 2, 2), torch.tensor([0, 2]), torch.tensor([3, 4])
    >>> with method.teach(teacher, x):
    ...     loss = method.loss(torch.randn(2, 3), y, index)
    """

    current_share: Tensor
    current_temperature: Tensor

    @check_arguments
    def __init__(
        self,
        *,
        share: tuple[float, float] = SHARE,
        temperature: tuple[float, float] = TEMPERATURE,
        smoothing: float = 0.0,
        noise: Noise = "uniform",
    ) -> None:
        super().__init__(smoothing=smoothing, noise=noise)
        if not all(0 <= end <= 1 for end in share) or not all(0 < end < math.inf for end in temperature):
            raise UsageError(f"a teacher needs shares in [0, 1] and temperatures above 0; got {share=}, {temperature=}")
        self.share, self.temperature = share, temperature
        self._logits: Tensor | None = None

    def setup(self, examples: int, device: torch.device | str | None) -> None:
        """Create the values of an epoch, which follow from its number and are no part of the state."""
        for name, (first, _) in (("current_share", self.share), ("current_temperature", self.temperature)):
            self.register_buffer(name, torch.tensor(float(first), device=device), persistent=False)

    def start_epoch(self, epoch: int, epochs: int | None) -> None:
        """Set the share and the temperature of this epoch."""
        constant = self.share[0] == self.share[1] and self.temperature[0] == self.temperature[1]
        if epochs is None and not constant:
            raise UsageError("a teacher whose share changes needs the number of epochs: start_epoch(epoch, epochs=...)")
        self.current_share.fill_(_anneal(self.share, epoch, epochs))
        self.current_temperature.fill_(_anneal(self.temperature, epoch, epochs))

    @contextmanager
    def teach(self, teacher: nn.Module, x: Tensor) -> Iterator[None]:
        """Use the teacher's predictions for these clean images in the losses inside the context."""
        with torch.no_grad(), set_mode(teacher, training=False):
            self._logits = teacher(x)
        try:
            yield
        finally:
            self._logits = None

    def forward(self, logits: Tensor, y: Tensor, index: Tensor, rng: CounterRNG) -> Tensor:
        """Return the softened labels mixed with the teacher's predictions."""
        labels = super().forward(logits, y, index, rng)
        if self._logits is None or self._logits.shape != logits.shape:
            raise UsageError(
                "these targets need the teacher's predictions for the same images: compute the loss inside "
                "`with method.teach(teacher, x):`"
            )
        predicted = (to_float32(self._logits) / self.current_temperature).softmax(1)
        doubt = predicted.amax(1) - predicted.gather(1, y[:, None])[:, 0]
        trust = (self.current_share - doubt).clamp(0, 1)[:, None].to(labels.dtype)
        return (1 - trust) * labels + trust * predicted.to(labels.dtype)


def _anneal(ends: tuple[float, float], epoch: int, epochs: int | None) -> float:
    """Return the value of an epoch between the first and the last one."""
    first, last = ends
    passed = 0.0 if epochs is None or epochs < 2 else epoch / (epochs - 1)
    return last + (first - last) * (1 + math.cos(math.pi * passed)) / 2
