"""Adversarial weight perturbation (AWP): the weights are trained on the gradient at a worse point nearby.

A step with perturbed weights is, for each weight tensor w with two or more dimensions (convolutions and linear layers),

    w' = w + gamma |w| d / |d|        d: a direction in which the loss rises
    g  = gradient of the loss at w'
    w  <- optimiser(w, g)             w is restored to the bit first

`ascent` is AWP itself (Wu et al., 2020): d is the gradient of the training loss at w, for one more forward and backward
pass. `attack` takes d from the attack's own pass, which then computes weight gradients too: a third of that cost.
`momentum` takes the optimiser's momentum, the average of earlier gradients: no further pass. Norms are Euclidean, over
the global batch's gradient where several processes train together.

With `depth_power` q, gamma of weight tensor l of L is multiplied by 1 - (ln l / ln L)^q, which is 0 in the last.
With `attack` and 0.3 this is LAP ("Layer-Aware Analysis of Catastrophic Overfitting", ICML 2024), as its text has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from atas.core.arguments import check_arguments
from atas.core.autograd import keep_statistics
from atas.errors import UsageError, unknown
from atas.methods.update import OptimizerUpdate, Update

DEFAULT_GAMMA = 0.005  # of AWP with TRADES; AWP with PGD uses 0.01
FORMS: tuple[str, ...] = ("ascent", "attack", "momentum")

Directions: TypeAlias = Sequence[Tensor | None]  # one for each weight

_TINY = 1e-20  # keeps the quotient finite where a direction is zero


class WeightPerturbation:
    """Where and how far weights are moved for the gradient of a step; see the module's text.

    `gamma` is the length of a move relative to the norm of the weight; with `depth_power`, that of the first weight.
    Assign it to `method.weight_perturbation`, and `method.step` uses it from epoch `from_epoch` on, counted from 0. In
    a loop with an optimiser and a loss of your own, `around` is all that is needed:

    >>> model = nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> x, y = torch.rand(3, 4), torch.tensor([0, 1, 1])
    >>> loss = lambda: nn.functional.cross_entropy(model(x), y)
    >>> optimizer.zero_grad()
    >>> with WeightPerturbation(gamma=0.01).around(model, optimizer, loss):
    ...     loss().backward()
    >>> optimizer.step()
    """

    @check_arguments
    def __init__(
        self, gamma: float = DEFAULT_GAMMA, form: str = "ascent", from_epoch: int = 0, depth_power: float | None = None
    ) -> None:
        if form not in FORMS:
            raise unknown("form of a weight perturbation", form, FORMS)
        self.gamma, self.form, self.from_epoch, self.depth_power = gamma, form, from_epoch, depth_power
        if not (0 <= gamma < math.inf and from_epoch >= 0 and (depth_power is None or depth_power > 0)):
            raise UsageError(f"a weight perturbation needs gamma >= 0, from_epoch >= 0, depth_power > 0; got {self}")

    def __repr__(self) -> str:
        return f"WeightPerturbation({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    def _gammas(self, count: int) -> list[float]:
        """Return the relative lengths of the moves of this number of weight tensors, in their order."""
        depths = [math.log(place) / math.log(max(count, 2)) for place in range(1, count + 1)]
        return [self.gamma * (1.0 if self.depth_power is None else 1 - depth**self.depth_power) for depth in depths]

    @contextmanager
    def around(
        self,
        model: nn.Module,
        update: Update | torch.optim.Optimizer,
        objective: Callable[[], Tensor] | None = None,
        attack_gradients: Directions | None = None,
    ) -> Iterator[None]:
        """Move the weights inside the context, in which the loss and its gradient are computed; then restore them.

        `objective` returns the training loss; only `ascent` calls it, at the unmoved weights. A method's own loss
        belongs in `method.keep_targets()` there: what it remembers of a batch, it remembers at the moved weights.
        """
        if isinstance(update, torch.optim.Optimizer):
            update = OptimizerUpdate(update, zero_grad=False)
        directions = self._directions(model, update, objective, attack_gradients)
        weights = update.weights
        moved = [row for row, weight in enumerate(weights) if weight.dim() > 1 and directions[row] is not None]
        offsets: list[Tensor | None] = [None] * len(weights)
        if moved:
            pairs = [(weights[row].detach(), directions[row]) for row in moved]
            for row, offset in zip(moved, scale_to_weights(pairs, self._gammas(len(pairs))), strict=True):
                offsets[row] = offset
        with update.offset_weights(offsets):
            yield

    def _directions(
        self,
        model: nn.Module,
        update: Update,
        objective: Callable[[], Tensor] | None,
        attack_gradients: Directions | None,
    ) -> Directions:
        if self.form == "momentum":
            return update.momentum
        if self.form == "ascent":
            if objective is None:
                raise UsageError("the form ascent needs the training loss: pass a function that returns it")
            with keep_statistics(model), torch.enable_grad():
                gradients, _ = update.weight_gradients(objective())
            return gradients
        if attack_gradients is None:
            raise UsageError("there is no attack pass to take a direction from; use the form ascent or momentum")
        return attack_gradients


@torch.no_grad()
def scale_to_weights(pairs: Sequence[tuple[Tensor, Any]], gammas: Sequence[float]) -> list[Tensor]:
    """Return for each weight and direction the multiple of the direction with the length gamma |weight|."""
    weights, directions = (list(side) for side in zip(*pairs, strict=True))
    lengths, norms = (torch._foreach_norm(side) for side in (directions, weights))
    factors = (torch.stack(torch._foreach_mul(norms, gammas)) / (torch.stack(lengths) + _TINY)).unbind()
    return [direction * factor for direction, factor in zip(directions, factors, strict=True)]


class WeightGradientTap(nn.Module):
    """A model for an attack whose passes compute weight gradients beside the input gradient; it keeps the last ones."""

    def __init__(self, model: nn.Module, update: Update) -> None:
        super().__init__()
        self.model, self._update = model, update
        self.training = model.training
        self.gradients: Directions | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.model(x)

    def input_gradient(self, loss: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of a summed loss with respect to x (`core.autograd.SupportsInputGradient`)."""
        self.gradients, (gradient,) = self._update.weight_gradients(loss, x, summed=True)
        return gradient
