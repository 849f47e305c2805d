"""Models split behind their first layer, as YOPO needs them."""

from __future__ import annotations

import weakref
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from atas.core.autograd import graph_nodes
from atas.errors import UsageError, unknown


class _Reached(Exception):  # noqa: N818  (not an error: it carries a value out of a forward pass)
    def __init__(self, output: Tensor) -> None:
        super().__init__()
        self.output = output


def find_first_layer(
    model: nn.Module, name: str | None, *, use: str = "to start YOPO from; name one with layer=..."
) -> nn.Module:
    """Return the layer of that name, or the first convolution or linear layer; messages end with its `use`."""
    layers = dict(model.named_modules())
    if name is not None:
        if name not in layers:
            raise unknown("layer", name, [layer for layer in layers if layer])
        return layers[name]
    for layer in layers.values():
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear):
            return layer
    raise UsageError(f"this model has no convolution or linear layer {use}")


class SplitModel(Protocol):
    """A model split behind its first layer f1."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits and the output of f1, which requires a gradient."""

    def first_layer(self, x: Tensor) -> Tensor:
        """Return f1(x) without running the rest of the model."""

    def first_layer_vjp(self, adjoint: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of adjoint . f1(x) with respect to x."""


@runtime_checkable
class SupportsSplit(Protocol):
    """A model that no hook can split, but that can split itself."""

    def split_first_layer(self) -> SplitModel:
        """Return the model split behind its first layer."""


class HookedSplit:
    """Any model, split by hooks behind the layer of a name, or behind its first convolution or linear layer."""

    def __init__(self, model: nn.Module, name: str | None = None) -> None:
        self._model, self._layer = model, find_first_layer(model, name)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits and the layer's output."""
        outputs: list[Tensor] = []

        def keep(_module: nn.Module, _inputs: object, output: object) -> Tensor:
            if not isinstance(output, Tensor):
                raise UsageError(
                    f"YOPO cannot start from a layer that returns a {type(output).__name__}; name one that returns a "
                    f"tensor, with layer=..."
                )
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
        known = _checked_splits.get(self._model)
        if isinstance(logits, Tensor) and (known is None or known() is not self._layer):
            self._check(point, outputs, logits)
            _checked_splits[self._model] = weakref.ref(self._layer)
        return logits, outputs[-1]

    def _check(self, point: Tensor, outputs: list[Tensor], logits: Tensor) -> None:
        """Raise UsageError unless the logits depend on the point through one output of the layer alone."""
        name = next(name for name, module in self._model.named_modules() if module is self._layer)
        if len(outputs) > 1:
            why = f"a pass uses it {len(outputs)} times"
        elif depends_on(logits, point, except_through=outputs[0]):
            why = "the network also sees the images past it"
        else:
            return
        raise UsageError(
            f"YOPO cannot take its steps through the layer '{name}' alone, because {why}; name a layer that everything "
            f"goes through once, with layer=..., or use another method"
        )

    def first_layer(self, x: Tensor) -> Tensor:
        """Return the layer's output."""

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

    def first_layer_vjp(self, adjoint: Tensor, x: Tensor) -> Tensor:
        """Return the vector-Jacobian product by autograd."""
        x = x.detach().requires_grad_(True)
        (gradient,) = torch.autograd.grad((self.first_layer(x) * adjoint).sum(), x)
        return gradient


_checked_splits: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()


def depends_on(output: Tensor, leaf: Tensor, *, except_through: Tensor) -> bool:
    """Return whether autograd has a way from the output to the leaf that does not go through a tensor between them.

    >>> x = torch.ones(2, requires_grad=True)
    >>> y = x.exp()
    >>> depends_on(y.sin(), x, except_through=y), depends_on(y.sin() + x, x, except_through=y)
    (False, True)
    """
    if except_through.is_leaf:  # a layer that hands on its input
        return False
    return any(getattr(node, "variable", None) is leaf for node in graph_nodes(output, except_through))


def _unused() -> UsageError:
    return UsageError("the layer that YOPO starts from does not take part in the forward pass; name another one")
