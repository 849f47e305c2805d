"""YOPO: many attack steps for the price of one, because only the first layer is run again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, Unpack

import torch
from torch import Tensor, nn

from atas.boxes import AnyView
from atas.errors import UsageError, unknown
from atas.methods._method import Common, Method, Step, Update
from atas.threat import Threat


class _Reached(Exception):  # noqa: N818  (not an error: it carries a value out of a forward pass)
    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output


def first_layer(model: nn.Module, name: str | None) -> nn.Module:
    """The layer of that name, or the first convolution or linear layer."""
    layers = dict(model.named_modules())
    if name is not None:
        if name not in layers:
            raise unknown("layer", name, [layer for layer in layers if layer])
        return layers[name]
    for layer in layers.values():
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear):
            return layer
    raise UsageError("this model has no convolution or linear layer to start YOPO from; name one with layer=...")


class Cut(Protocol):
    """A model cut behind its first layer f1."""

    def through(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The logits, and the output of f1 on the way to them, which has a gradient."""

    def to(self, x: Tensor) -> Tensor:
        """f1(x), without running what comes after it."""

    def pull(self, costate: Tensor, x: Tensor) -> Tensor:
        """The gradient of costate . f1(x) by x."""


class Hooked:
    """Any model, cut by hooks behind a layer."""

    def __init__(self, model: nn.Module, layer: nn.Module) -> None:
        self._model, self._layer = model, layer

    def through(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The logits, and the layer's output."""
        outputs: list[Tensor] = []

        def keep(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
            outputs.append(output)
            return output.clone()  # what comes next may work in place

        point = x.detach().requires_grad_(True)  # so the output has a gradient, the layer's weights frozen or not
        handle = self._layer.register_forward_hook(keep)
        try:
            logits = self._model(point)
        finally:
            handle.remove()
        if not outputs:
            raise _unused()
        return logits, outputs[-1]

    def to(self, x: Tensor) -> Tensor:
        """The layer's output."""

        def stop(_module: nn.Module, _inputs: object, output: Tensor) -> None:
            raise _Reached(output)

        handle = self._layer.register_forward_hook(stop)
        try:
            self._model(x)
        except _Reached as reached:
            return reached.output
        finally:
            handle.remove()
        raise _unused()

    def pull(self, costate: Tensor, x: Tensor) -> Tensor:
        """By autograd."""
        x = x.detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad((self.to(x) * costate).sum(), x)
        return gradient


def _unused() -> UsageError:
    return UsageError("the layer that YOPO starts from does not take part in the forward pass; name another one")


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
        **common: Unpack[Common],
    ) -> None:
        super().__init__(threat, examples, shape, **common)
        if outer < 1 or inner < 1:
            raise UsageError(f"YOPO needs outer >= 1 and inner >= 1; got {outer} and {inner}")
        self.outer, self.inner, self.layer, self.twice = outer, inner, layer, first_layer_twice
        self.by_kernels = layer is None  # they know one place to cut
        self.step_size = threat.size("step_size", threat.usual(2 / 255, 0.25) if step_size == "auto" else step_size)

    def learn(self, model: nn.Module, update: Update, x: Tensor, y: Tensor, index: Tensor, view: AnyView) -> Step:
        """All passes of one batch and the update; what is returned belongs to the last whole pass."""
        cut = self._cut(model)
        point = self.threat.random_start(x, self.draw(index))
        for left in reversed(range(self.outer)):
            inputs = point
            logits, output = cut.through(inputs)
            loss = self.mean_loss(logits, y)
            (costate,) = update.backward(loss, output)
            if not left and not self.twice:
                break  # nothing would be learnt at the next point
            for _ in range(self.inner):
                gradient = cut.pull(costate, point)
                point = self.threat.ascend(point, gradient, self.step_size * self.step_scale, x)
            if self.twice and (hamiltonian := (cut.to(point) * costate).sum()).requires_grad:
                update.backward(hamiltonian)
        update.apply()
        return Step(loss.detach(), inputs, logits.detach())

    def _cut(self, model: nn.Module) -> Cut:
        """By the model's fast forward pass where it has one, which no hook sees."""
        fast = getattr(model.forward, "cut", None)
        return Hooked(model, first_layer(model, self.layer)) if fast is None else fast()
