"""The interfaces `Attack` and `StagedAttack`, the attack `Clean`, and the context in which gradient attacks run.

`attack_context` checks the inputs and holds the model in eval mode with frozen weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from atas.attacks.search import Search
from atas.core.autograd import cross_entropy_sum, freeze, input_gradient, set_mode
from atas.core.validation import DeviceChecks, check_logits, check_module, check_shapes
from atas.errors import DataError
from atas.threat import Threat


class Attack(Protocol):
    """An attack whose own settings are fixed; model, images, labels and threat come with the call.

    It keeps nothing between calls, moves no tensor, and leaves the model as it found it. What it finds for an example
    depends on the seed and on the example's index, not on the batch.
    """

    @property
    def name(self) -> str:
        """What results are filed under."""

    def settings(self, threat: Threat) -> dict[str, Any]:
        """What a result file has to say for someone to repeat the attack; plain JSON values."""

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, seed: int = 0, index: Tensor | None = None
    ) -> Tensor:
        """Adversarial inputs, one for each image, in the dtype and on the device of x."""


@runtime_checkable
class StagedAttack(Attack, Protocol):
    """An attack that is made of searches, one after the other, each on the examples that are still right.

    An evaluation runs the searches themselves, so that it can tell how far they are, stop, and go on.
    """

    @property
    def stages(self) -> tuple[Search, ...]:
        """The searches in their order."""

    @property
    def skips_misclassified(self) -> bool:
        """Whether an image that is misclassified as it is counts as broken, and is left alone."""


@dataclass(frozen=True)
class Clean:
    """No attack: the images as they are."""

    name: ClassVar[str] = "clean"

    def settings(self, threat: Threat) -> dict[str, Any]:
        """There is nothing to set."""
        return {}

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, seed: int = 0, index: Tensor | None = None
    ) -> Tensor:
        """The images themselves."""
        return x.detach()


def step_settings(size: float) -> dict[str, Any]:
    """A step size for a result file, in grey levels to read and as it is to repeat.

    >>> step_settings(8 / 255 / 5)["step_size"]
    '1.6/255'
    """
    return {"step_size": f"{size * 255:.6g}/255", "step_size_value": size}


@dataclass(frozen=True)
class AttackTarget:
    """A model under attack at some images."""

    model: nn.Module
    x: Tensor
    y: Tensor
    threat: Threat
    loss: Callable[[Tensor, Tensor], Tensor]

    def step(self, point: Tensor, size: float) -> Tensor:
        """One step up the loss, projected. Where the gradient is not a number the point stays."""
        gradient, _ = input_gradient(self.model, point, self.y, self.loss)
        return self.threat.ascend(point, gradient.nan_to_num(), size, self.x)


@contextmanager
def attack_context(
    model: nn.Module, x: Tensor, y: Tensor, threat: Threat, index: Tensor | None = None
) -> Iterator[AttackTarget]:
    """Check the inputs and hold the model in eval mode, its weights without gradients; both are put back at the end.

    On the CPU a wrong value is an error at once; on a GPU when the attack is over, so that the host never waits for
    the device between the steps.
    """
    check_module(model)
    check_shapes(x, y, index, None)
    for name, tensor in (("labels", y), ("indices", index)):
        if tensor is not None and tensor.device != x.device:
            raise DataError(f"the {name} live on {tensor.device}, the images on {x.device}: move them with .to()")
    # What is made in inference mode cannot take part in a backward pass: hence no inference mode, and copies.
    with torch.inference_mode(False), torch.no_grad(), set_mode(model, training=False), freeze(model):
        guard = DeviceChecks(x.device)
        if x.numel():
            guard.images(x)

        def loss(output: Tensor, y: Tensor) -> Tensor:
            logits = check_logits(output, len(y))
            return cross_entropy_sum(logits, guard.labels(y, logits.shape[1]))

        yield AttackTarget(model, x.detach().clone(), y.to(torch.int64, copy=True), threat, loss)
        guard.raise_if_set()
