"""LIET: one step from a start that hides what attacks tell about the label, and random soft labels.

T has one perturbation per class c, renewed in every 20th batch of an epoch: eps sgn grad l~ at a uniformly grey image
with label c, in eval mode. l~ is the cross-entropy with labels that keep 1 - smoothing; the rest goes to the other
classes by random weights, new ones in every use. For each image x with label y:

    q  = T[y], with the share r of its values replaced by uniform noise     r uniform in `ratio`, one for the batch
    x0 = P01[x + q] or P01[x - q], by chance for the batch                  P01: clamp to [0, 1]
    x1 = P[x0 + eps sgn grad l~(x0, y)]                                     model in train mode
    one SGD step on l~(x1, y) + weight (e + 1) / E JS(f(x0), f(x1))         epoch e of E; gradients through both

"Mitigating Catastrophic Overfitting in Fast Adversarial Training via Label Information Elimination", ICCV 2025. For
budgets above 8/255 its code draws the noise from twice the ball and clamps x1 to [0, 1] alone: here `inside=False`. It
keeps the graph of the pass at x0; here the pass is repeated for the weights, and the running statistics of BatchNorm
count it once. A captured step cannot skip a pass, so T is computed in every step, and replaced when it is due.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from atas.core.arguments import check_count
from atas.core.autograd import freeze, input_gradient, keep_statistics, set_mode, soft_cross_entropy
from atas.core.dispatch import fast_op
from atas.core.rng import CounterRNG, Stream
from atas.core.validation import check_logits
from atas.data.loader import Batch
from atas.errors import UsageError
from atas.methods.base import CommonArgs, InputPerturbation, StepOutput
from atas.methods.checks import check_shown_shape
from atas.methods.consistency import Consistency
from atas.methods.n_fgsm import wide_balls
from atas.methods.step_warnings import warn_of_steps
from atas.methods.targets import LabelTargets
from atas.methods.update import Update
from atas.methods.weight_perturbation import FORMS
from atas.threat import Size, Threat


class LIET(InputPerturbation):
    """Label-information elimination (LIET, 2025).

    `classes` is the number of the model's outputs; `atas.train` passes it. `smoothing` is the share of a label that is
    spread over the other classes, `weight` that of the Jensen-Shannon divergence in the last epoch. `ratio` is the
    smallest and the largest share of noise in the start, `refresh_every` a number of batches. `step_size` is eps by
    default. Cost: three forward passes, a backward pass to the input, two to the weights; and a forward and a backward
    pass of `classes` images.
    """

    fixed_size = True
    has_start = True
    own_targets = ("smoothing",)
    own_consistency = ("weight",)
    weight_perturbations = FORMS
    replicated_buffers = frozenset({"patterns"})
    batches: Tensor
    patterns: Tensor
    targets: LabelTargets

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        classes: int,
        smoothing: float = 0.6,
        weight: float = 100.0,
        ratio: tuple[float, float] = (0.1, 0.5),
        refresh_every: int = 20,
        inside: bool = True,
        step_size: Size = "auto",
        **common: Unpack[CommonArgs],
    ) -> None:
        self.check_own_parts(common)
        common["targets"] = LabelTargets(smoothing=smoothing, noise="random")
        common["consistency"] = Consistency(weight, distance="js", ramp=1.0, through="both")
        super().__init__(threat, examples, shape, **common)
        if classes < 2 or not 0 <= ratio[0] <= ratio[1] <= 1:
            raise UsageError(f"LIET needs classes >= 2 and 0 <= ratio[0] <= ratio[1] <= 1; got {classes=}, {ratio=}")
        self.classes, self.ratio = classes, ratio
        self.refresh_every = check_count("refresh_every", refresh_every)
        self.step_size = threat.size("step_size", step_size, auto=1.0)
        self.settings_warning = warn_of_steps(threat, self.step_size)
        self._noisy, self._reach = threat, threat
        if not inside:
            self._noisy, self._reach = wide_balls(threat, 2 * threat.eps, self.step_size)
        self.register_buffer("batches", torch.zeros_like(self.epoch))  # of this epoch so far
        self.register_buffer("patterns", torch.zeros(classes, *shape, device=self.epoch.device))

    def on_new_epoch(self, epoch: int, epochs: int | None) -> None:
        """Count batches from 0 again."""
        self.batches.zero_()

    def training_step(self, model: nn.Module, update: Update, batch: Batch) -> StepOutput:
        """Renew the perturbations of the classes if it is due, attack, and update the weights with both terms."""
        check_shown_shape(batch.x, self.patterns.shape[1:], "liet keeps perturbations of one shape")
        self._renew_patterns(model)
        output = super().training_step(model, update, batch)
        self.batches += 1
        return output

    def attack(self, model: nn.Module, batch: Batch) -> Tensor:
        """Take a step from the start that hides the label."""
        x, y, rng = batch.x, self.checks.labels(batch.y, self.classes), self.rng(batch.index)
        chance = CounterRNG(self.seed, self.epoch, self.batches.view(1)).uniform(Stream.BATCH, (2,))
        share = self.ratio[0] + (self.ratio[1] - self.ratio[0]) * chance[:, 0]
        start = hidden_start(self._noisy, x, self.patterns[y], rng, share, chance[:, 1] < 0.5)
        with keep_statistics(model):
            gradient = self.start_gradient(model, start, y, self._attack_loss(self.rng(batch.index, 1)))
        return self._reach.ascend(start, gradient, self.step_size * self.step_scale, x)

    def _attack_loss(self, rng: CounterRNG) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the summed cross-entropy with labels that are softened by random weights of their own."""

        def loss(logits: Tensor, y: Tensor) -> Tensor:
            if check_logits(logits, len(y)).shape[1] != self.classes:
                raise UsageError(f"the model has {logits.shape[1]} outputs; create the method with that many classes")
            return soft_cross_entropy(logits, self.targets(logits, y, rng.index, rng)) * len(y)

        return loss

    def _renew_patterns(self, model: nn.Module) -> None:
        labels = torch.arange(self.classes, device=self.patterns.device)
        number = 2 * self.shard.examples + self.batches * self.classes + labels  # no example's draws have them
        loss = self._attack_loss(CounterRNG(self.seed, self.epoch, number))
        with set_mode(model, training=False), freeze(model):
            gradient, _ = input_gradient(model, torch.full_like(self.patterns, 0.5), labels, loss)
        renewed = self.threat.step(torch.zeros_like(self.patterns), gradient, self.threat.eps)
        self.patterns.copy_(torch.where(self.batches % self.refresh_every == 0, renewed, self.patterns))


@fast_op
def hidden_start(
    threat: Threat, x: Tensor, perturbation: Tensor, rng: CounterRNG, share: Tensor, negative: Tensor
) -> Tensor:
    """Return a start: the image plus a perturbation, part of which is replaced by noise, or minus it."""
    noise = threat.sample(rng, x.shape[1:])
    change = torch.where(rng.uniform(Stream.MASK, x.shape[1:]) < share, noise, perturbation).to(x.dtype)
    return threat.project(x + torch.where(negative, -change, change), x)
