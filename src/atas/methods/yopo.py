"""YOPO: many attack steps for the price of one, because only the first layer is run again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Unpack

from torch import Tensor, nn

from atas.core.autograd import HookedSplit, SplitModel, SupportsSplit, find_first_layer
from atas.core.resized_crop import AnyView
from atas.errors import UsageError
from atas.methods.base import CommonArgs, Method, StepOutput, Update
from atas.threat import Threat


class YOPO(Method):
    """You only propagate once (Zhang et al., 2019), YOPO-5-3.

    From a random start, m = 5 times: one whole pass whose weight gradients are collected and whose gradient p at the
    first layer's output is kept; then, but after the last pass, n = 3 steps x <- P[x + a sgn grad (p . f1(x))] through
    the first layer alone. Then one update, whose rate is small because five passes add up. Train mode. The random start
    is clamped to [0, 1] from the beginning.

    The authors' code also adds the gradient of p . f1, at the point that the steps lead to, to that of the first layer,
    which it so collects twice (`first_layer_twice`). The steps have made p . f1 large, so this shrinks the filters, and
    where BatchNorm follows, the smaller a filter is the further it moves: a training on CIFAR-10 broke down with it.
    """

    compilable = False

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        outer: int = 5,
        inner: int = 3,
        step_size: float | Literal["auto"] = "auto",
        first_layer_twice: bool = False,
        layer: str | None = None,
        **common: Unpack[CommonArgs],
    ) -> None:
        super().__init__(threat, examples, shape, **common)
        if outer < 1 or inner < 1:
            raise UsageError(f"YOPO needs outer >= 1 and inner >= 1; got {outer} and {inner}")
        self.outer, self.inner, self.layer, self.twice = outer, inner, layer, first_layer_twice
        self.uses_fast_network = layer is None  # they know one place to cut
        self.step_size = threat.check_size(
            "step_size", threat.default_size(2 / 255, 0.25) if step_size == "auto" else step_size
        )

    def training_step(
        self, model: nn.Module, update: Update, x: Tensor, y: Tensor, index: Tensor, view: AnyView
    ) -> StepOutput:
        """All passes of one batch and the update; what is returned belongs to the last whole pass."""
        split = self._split(model)
        point = self.threat.random_start(x, self.rng(index))
        for left in reversed(range(self.outer)):
            inputs = point
            logits, output = split.forward(inputs)
            loss = self.loss(logits, y)
            (adjoint,) = update.backward(loss, output)
            if not left and not self.twice:
                break  # nothing would be learnt at the next point
            for _ in range(self.inner):
                gradient = split.first_layer_vjp(adjoint, point)
                point = self.threat.ascend(point, gradient, self.step_size * self.step_scale, x)
            if self.twice and (hamiltonian := (split.first_layer(point) * adjoint).sum()).requires_grad:
                update.backward(hamiltonian)
        update.apply()
        return StepOutput(loss.detach(), inputs, logits.detach())

    def _split(self, model: nn.Module) -> SplitModel:
        """Split the model behind its first layer: by its own means if it has them, otherwise by hooks."""
        if isinstance(model, SupportsSplit):
            return model.split_first_layer()
        return HookedSplit(model, find_first_layer(model, self.layer))
