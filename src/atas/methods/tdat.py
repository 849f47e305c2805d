"""TDAT: one step from the last batch's perturbations, labels that relax, and doubtful images that weigh more.

A perturbation d belongs to a position in the batch, not to an example; it starts as eps times random signs. In epoch e
of E the labels keep the share s = max(0.6 tan(1 - e / E), 0.15): 0.93 at first. For each image x with label y:

    x0 = x + d                                             not clamped to [0, 1]
    x1 = P[x0 + eps sgn grad l'(x0, y)],  d <- x1 - x      l': the true class has s, each other one (1 - s) / (C - 1)
    loss = l"(x1, y) + weight mean of [tanh(1.0000001 - p_y) |f(x0) - f(x1)|^2],  p = softmax f(x0)

l" is the cross-entropy with label smoothing 1 - s. All passes are in train mode, and gradients go through both f.
Tong et al., "Taxonomy Driven Fast Adversarial Training", AAAI 2024. As in the authors' code, in which the average of d
with its earlier value, which the paper has, is overwritten. Their code leaves out a short last batch of an epoch; here
it uses the first perturbations. It keeps the graph of the pass at x0; here that pass is repeated for the weights, and
the running statistics of BatchNorm count it once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor, nn

from atas.core.arguments import check_count
from atas.core.autograd import freeze, input_gradient, keep_statistics, soft_cross_entropy, to_float32
from atas.core.rng import CounterRNG, Stream
from atas.core.validation import check_logits
from atas.data.loader import Batch
from atas.distributed.sharding import DataShard
from atas.errors import UsageError
from atas.methods.base import CommonArgs, Method, StepOutput
from atas.methods.checks import carried_rows
from atas.methods.consistency import squared_logits
from atas.methods.step_warnings import warn_of_steps
from atas.methods.targets import RelaxedLabels
from atas.methods.update import Update
from atas.threat import Size, Threat


class TDAT(Method):
    """Taxonomy-driven fast adversarial training (Tong et al., 2024).

    `weight` is that of the squared distance of logits, `label_factor` and `label_floor` the numbers in the share that
    labels keep. `batch_size` is the largest batch; `atas.train` passes it. `step_size` is eps by default. Cost: three
    forward, one input and two weight passes.
    """

    fixed_size = True
    own_targets = ("label_factor", "label_floor")
    weight_perturbations = ("ascent", "momentum")
    carried: Tensor
    targets: RelaxedLabels

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        weight: float = 0.65,
        label_factor: float = 0.6,
        label_floor: float = 0.15,
        step_size: Size = "auto",
        batch_size: int = 128,
        **common: Unpack[CommonArgs],
    ) -> None:
        self.check_own_parts(common)
        common["targets"] = RelaxedLabels(factor=label_factor, floor=label_floor)
        super().__init__(threat, examples, shape, **common)
        if not 0 <= weight < math.inf:
            raise UsageError(f"weight must be a number that is not negative; got {weight}")
        self.weight = weight
        self.step_size = threat.size("step_size", step_size, auto=1.0)
        self.settings_warning = warn_of_steps(threat, self.step_size)
        count = check_count("batch_size", batch_size)
        self.register_buffer("carried", torch.zeros(count, *shape, device=self.epoch.device))
        self.set_shard(self.shard)

    def set_shard(self, shard: DataShard) -> None:
        """Start with the random signs of this shard's positions."""
        super().set_shard(shard)
        positions = shard.global_index(torch.arange(len(self.carried), device=self.carried.device))
        rng = CounterRNG(self.seed, torch.zeros_like(self.epoch), positions)
        signs = rng.normal(Stream.RESET, self.carried.shape[1:])
        self.carried.copy_(self.threat.step(torch.zeros_like(self.carried), signs, self.threat.eps))

    def training_step(self, model: nn.Module, update: Update, batch: Batch) -> StepOutput:
        """Attack, then update the weights with both terms."""
        x, y = batch.x, batch.y
        start = x + carried_rows(self.carried, x, "tdat")
        with keep_statistics(model), freeze(model):
            gradient, _ = input_gradient(model, start, y, self._relaxed_loss)
        inputs = self.threat.ascend(start, gradient, self.step_size * self.step_scale, x).detach()
        self.carried[: len(x)] = inputs - x

        def objective() -> tuple[Tensor, Tensor]:
            first, logits = model(start), model(inputs)
            apart = self.weight / max(len(x), 1) * doubtful_distance(logits, first, y)
            return self.loss(logits, y, batch.index) + apart, logits

        loss, logits, _ = self.minimize(model, update, objective)
        return StepOutput(loss.detach(), inputs, logits.detach())

    def _relaxed_loss(self, logits: Tensor, y: Tensor) -> Tensor:
        y = self.checks.labels(y, check_logits(logits, len(y)).shape[1])
        return soft_cross_entropy(logits, self.targets.of_attack(logits, y)) * len(y)


def doubtful_distance(logits: Tensor, start: Tensor, y: Tensor) -> Tensor:
    """Return the squared distance of logits, weighted by the doubt at the start, summed over the batch."""
    logits, start = to_float32(logits), to_float32(start)
    is_label = y[:, None] == torch.arange(start.shape[1], device=y.device)
    probability = torch.where(is_label, start.softmax(1), 0.0).sum(1)
    return (torch.tanh(1.0000001 - probability) * squared_logits(logits, start)).sum()
