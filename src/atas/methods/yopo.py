"""YOPO: several attack steps per full pass, because only the first layer is run again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from torch import nn

from atas.core.split_model import HookedSplit, SplitModel, SupportsSplit
from atas.data.loader import Batch
from atas.errors import UsageError
from atas.methods.base import CommonArgs, Method, StepOutput
from atas.methods.step_warnings import warn_of_steps
from atas.methods.update import Update
from atas.threat import Size, Threat


class YOPO(Method):
    """You only propagate once (Zhang et al., 2019), YOPO-5-3.

    From a random start, m = 5 full passes accumulate weight gradients and give the gradient p at the first layer's
    output. After each pass but the last, n = 3 steps x <- P[x + a sgn grad (p . f1(x))] use the first layer only.
    Then one update follows, with a small learning rate because the gradients of five passes are summed. All passes run
    in train mode. The random start is clamped to [0, 1].

    The authors' code also adds the gradient of p . f1, after the steps, to that of the first layer, and so counts it
    twice (`first_layer_twice`). The steps have increased p . f1, so this shrinks the filters, and small filters before
    BatchNorm move further in each update: a training on CIFAR-10 broke down with it.
    """

    compilable = False
    weight_perturbations = ("momentum",)  # of all passes: they serve attack and weights alike
    needs_hooks = True

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        outer: int = 5,
        inner: int = 3,
        step_size: Size = "auto",
        first_layer_twice: bool = False,
        layer: str | None = None,
        **common: Unpack[CommonArgs],
    ) -> None:
        super().__init__(threat, examples, shape, **common)
        if outer < 1 or inner < 1:
            raise UsageError(f"YOPO needs outer >= 1 and inner >= 1; got {outer} and {inner}")
        self.outer, self.inner, self.layer, self.twice = outer, inner, layer, first_layer_twice
        self.uses_fast_network = layer is None  # they know one place to cut
        self.step_size = threat.size("step_size", step_size, auto=0.25)
        self.settings_warning = warn_of_steps(threat, self.step_size, inner * max(1, outer - 1))

    def training_step(self, model: nn.Module, update: Update, batch: Batch) -> StepOutput:
        """Run all passes of a batch and the update; return the output of the last full pass."""
        with self.perturbed_weights(model, update):
            output = self._passes(model, update, batch)
        update.apply()
        return output

    def _passes(self, model: nn.Module, update: Update, batch: Batch) -> StepOutput:
        x, y = batch.x, batch.y
        split = self._split(model)
        point = self.threat.random_start(x, self.rng(batch.index))
        for remaining in reversed(range(self.outer)):
            inputs = point
            logits, output = split.forward(inputs)
            loss = self.loss(logits, y, batch.index)
            (adjoint,) = update.backward(loss, output)
            if not remaining and not self.twice:
                break  # no pass follows at the next point
            for _ in range(self.inner):
                gradient = split.first_layer_vjp(adjoint, point)
                point = self.threat.ascend(point, gradient, self.step_size * self.step_scale, x)
            if self.twice and (hamiltonian := (split.first_layer(point) * adjoint).sum()).requires_grad:
                update.backward(hamiltonian)
        return StepOutput(loss.detach(), inputs, logits.detach())

    def _split(self, model: nn.Module) -> SplitModel:
        """Split the model behind its first layer: by its own means if it has them, otherwise by hooks."""
        if isinstance(model, SupportsSplit):
            return model.split_first_layer()
        return HookedSplit(model, self.layer)
