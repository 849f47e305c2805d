"""AAER: a term of the loss for examples whose loss an attack step has lowered; its attack is that of N-FGSM or FGSM-RS.

An example is abnormal if its loss falls from the start x0 of the attack to its end x1. Their number rises as a collapse
begins. A training step on a batch of B examples (Lin et al., "Eliminating Catastrophic Overfitting Via Abnormal
Adversarial Examples Regularization", 2023) is

    x0 = x + 2 eps U,  x1 = x0 + eps sgn grad l(x0)            N-AAER, clamped to [0, 1]; or as FGSM-RS: RS-AAER
    A  = the abnormal examples, N = the others, V(S) = mean over S of |f(x0) - f(x1)|^2
    one SGD step on l(x1, y) + |A| / B (w_loss mean over A of (l(x0) - l(x1)) + w_logits max(V(A) - V(N), 0))

The logits at x0 and V(N) are constants. The term is left out if A or N is empty. In the released code, both losses of
the term with w_loss are constants too, so that it has no gradient: hence w_loss = 0 here. All passes run in train mode.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atas.core.autograd import input_gradient, to_float32
from atas.core.dispatch import fast_op
from atas.data.loader import Batch
from atas.errors import UsageError
from atas.methods.base import CommonArgs, InputPerturbation
from atas.methods.n_fgsm import wide_balls
from atas.methods.step_warnings import warn_of_steps
from atas.threat import Linf, Size, Threat

# The authors' weights for CIFAR-10 at these budgets, in 1/255: of losses, and of logits.
_BUDGETS = (8, 12, 16, 32)
_PUBLISHED = {
    "n-fgsm": ((1.5, 5.0, 8.5, 2.75), (0.15, 0.55, 1.5, 0.75)),
    "fgsm-rs": ((2.5, 5.0, 7.0, 5.75), (1.5, 2.75, 3.25, 1.5)),
}


def default_weight(values: Sequence[float], threat: Threat) -> float:
    """Return the weight at this budget, linear between the published ones and constant beyond them."""
    if not isinstance(threat, Linf):
        raise UsageError("AAER has default weights for Linf alone; set logit_weight for this norm")
    levels = min(max(255 * threat.eps, _BUDGETS[0]), _BUDGETS[-1])
    high = max(1, bisect_left(_BUDGETS, levels))
    part = (levels - _BUDGETS[high - 1]) / (_BUDGETS[high] - _BUDGETS[high - 1])
    return values[high - 1] + part * (values[high] - values[high - 1])


class AAER(InputPerturbation):
    """Abnormal adversarial examples regularisation, with the attack of N-FGSM or of FGSM-RS.

    With `attack_by="n-fgsm"` perturbations leave the ball, by up to three times eps. `logit_weight` is w_logits and
    `loss_weight` is w_loss; "auto" takes the authors' values for CIFAR-10, between their budgets linearly.
    """

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        attack_by: Literal["n-fgsm", "fgsm-rs"] = "n-fgsm",
        step_size: Size = "auto",
        logit_weight: float | Literal["auto"] = "auto",
        loss_weight: float | Literal["auto"] = 0.0,
        **common: Unpack[CommonArgs],
    ) -> None:
        super().__init__(threat, examples, shape, **common)
        of_losses, of_logits = _PUBLISHED[attack_by]
        self.loss_weight = default_weight(of_losses, threat) if loss_weight == "auto" else loss_weight
        self.logit_weight = default_weight(of_logits, threat) if logit_weight == "auto" else logit_weight
        if not (self.loss_weight >= 0 and self.logit_weight >= 0):
            given = f"{self.loss_weight} and {self.logit_weight}"
            raise UsageError(f"loss_weight and logit_weight must not be negative; got {given}")
        self.attack_by = attack_by
        self.step_size = threat.size("step_size", step_size, auto=1.0 if attack_by == "n-fgsm" else 1.25)
        self.settings_warning = warn_of_steps(threat, self.step_size)
        self._noisy, self._reach = threat, threat
        if attack_by == "n-fgsm":
            self._noisy, self._reach = wide_balls(threat, 2 * threat.eps, self.step_size)

    def attack(self, model: nn.Module, batch: Batch) -> Tensor:
        """Take a step from a random start, and keep the start's logits."""
        start = self._noisy.random_start(batch.x, self.rng(batch.index))
        gradient, logits = input_gradient(model, start, batch.y, self.attack_loss)
        self._keep_start(start, logits)
        return self._reach.ascend(start, gradient, self.step_size * self.step_scale, batch.x)

    def loss(self, logits: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Return the loss at the perturbed inputs of the last attack, with the term for abnormal examples."""
        start = self._start_logits("the loss", len(logits))
        loss = super().loss(logits, y, index)
        y = self.checks.labels(y, logits.shape[1])
        drops, variations, abnormal = compare_with_start(logits, start, y)
        normal = ~abnormal
        sums = ((of * variations.detach()).sum() for of in (abnormal, normal))
        counts = (of.to(variations.dtype).sum() for of in (abnormal, normal))
        varied, reference, few, rest = self.total(*sums, *counts)
        return loss + abnormal_term(
            drops, variations, abnormal, varied / few, reference / rest, self.loss_weight, self.logit_weight
        )


@fast_op
def compare_with_start(logits: Tensor, start: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return how far the attack lowered each loss and moved the logits (squared), and which losses it lowered."""
    logits, start = to_float32(logits), to_float32(start)
    drops = F.cross_entropy(start, y, reduction="none") - F.cross_entropy(logits, y, reduction="none")
    return drops, (logits - start).square().sum(1), drops.detach() > 0


@fast_op
def abnormal_term(
    drops: Tensor,
    variations: Tensor,
    abnormal: Tensor,
    varied: Tensor,
    reference: Tensor,
    loss_weight: float,
    logit_weight: float,
) -> Tensor:
    """Return the term of a batch, given V(A) as `varied` and V(N) as `reference`; NaN is the mean of an empty set."""
    terms = loss_weight * drops + logit_weight * torch.where(varied > reference, variations - reference, 0.0)
    counts = abnormal & varied.isfinite() & reference.isfinite()
    return torch.where(counts, terms, 0.0).sum() / max(len(drops), 1)
