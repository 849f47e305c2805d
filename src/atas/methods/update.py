"""The interface between a training step and what runs it: gradients, all-reduce, optimiser."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from atas.core.autograd import temporary_values
from atas.core.validation import check_optimizer
from atas.errors import UsageError


class Update(Protocol):
    """The engine's part of a training step: gradients, all-reduce, optimiser.

    Methods call it and know nothing of precision, processes or CUDA graphs.
    """

    def backward(self, loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Accumulate weight gradients of the loss, and return its gradients with respect to `inputs`."""

    def apply(self) -> None:
        """Update the weights with the accumulated gradients."""

    def __call__(self, loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Call `backward`, then `apply`."""

    def total(self, *sums: Tensor) -> list[Tensor]:
        """Return sums over the global batch of what this process has summed over its part; no gradient goes through
        them."""

    # What a weight perturbation needs. All lists have one entry for each of `weights`.

    @property
    def weights(self) -> Sequence[Tensor]:
        """The weights as the optimiser keeps them."""

    @property
    def momentum(self) -> Sequence[Tensor | None]:
        """The optimiser's moving averages of the gradients; None for a weight that has none yet."""

    def weight_gradients(
        self, loss: Tensor, *inputs: Tensor, summed: bool = False
    ) -> tuple[list[Tensor | None], tuple[Tensor, ...]]:
        """Return the gradients of a loss over the global batch with respect to the weights, without accumulating them,
        and those of `inputs`. `summed`: the loss is a sum over examples, not a mean."""

    def offset_weights(self, offsets: Sequence[Tensor | None]) -> AbstractContextManager[None]:
        """Return a context in which passes see the weights with these offsets; they are restored to the bit."""


class OptimizerUpdate:
    """An `Update` around a torch optimiser."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, zero_grad: bool = True) -> None:
        check_optimizer(optimizer)
        self._optimizer = optimizer
        if zero_grad:
            optimizer.zero_grad(set_to_none=True)

    def backward(self, loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Accumulate weight gradients in `.grad`, as `loss.backward()` does."""
        for tensor in inputs:
            tensor.retain_grad()
        loss.backward()
        gradients = tuple(tensor.grad for tensor in inputs if tensor.grad is not None)
        for tensor in inputs:
            tensor.grad = None
        return gradients

    def apply(self) -> None:
        """Take one optimiser step."""
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def __call__(self, loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Call `backward`, then `apply`."""
        gradients = self.backward(loss, *inputs)
        self.apply()
        return gradients

    def total(self, *sums: Tensor) -> list[Tensor]:
        """Return the sums unchanged: an own loop has one process."""
        return [value.detach() for value in sums]

    @property
    def weights(self) -> Sequence[Tensor]:
        """The optimiser's trainable parameters."""
        groups = self._optimizer.param_groups
        return [weight for group in groups for weight in group["params"] if weight.requires_grad]

    @property
    def momentum(self) -> Sequence[Tensor | None]:
        """The momentum of SGD, or the first moment of Adam and its relatives."""
        defaults = self._optimizer.defaults
        if not defaults.get("momentum") and "betas" not in defaults:
            raise UsageError(
                f"{type(self._optimizer).__name__} has no momentum here to perturb the weights along; set its "
                f"momentum, or use the form ascent"
            )
        states = [self._optimizer.state.get(weight, {}) for weight in self.weights]
        return [state.get("momentum_buffer", state.get("exp_avg")) for state in states]

    def weight_gradients(
        self, loss: Tensor, *inputs: Tensor, summed: bool = False
    ) -> tuple[list[Tensor | None], tuple[Tensor, ...]]:
        """Return the gradients that `loss.backward()` gives, which wrappers of the model may average over processes."""
        tensors = [*self.weights, *inputs]
        accumulated = [tensor.grad for tensor in tensors]
        for tensor in tensors:
            tensor.grad = None
        loss.backward(inputs=tensors)
        gradients = [tensor.grad for tensor in tensors]
        for tensor, gradient in zip(tensors, accumulated, strict=True):
            tensor.grad = gradient
        count = len(tensors) - len(inputs)
        return gradients[:count], tuple(gradient for gradient in gradients[count:] if gradient is not None)

    @contextmanager
    def offset_weights(self, offsets: Sequence[Tensor | None]) -> Iterator[None]:
        """Offset the parameters in place; copies of them that autocast has cached are dropped."""
        pairs = [(weight, off) for weight, off in zip(self.weights, offsets, strict=True) if off is not None]
        weights = [weight for weight, _ in pairs]
        with temporary_values(weights, [weight.detach() + offset for weight, offset in pairs]):
            torch.clear_autocast_cache()
            yield
        torch.clear_autocast_cache()
