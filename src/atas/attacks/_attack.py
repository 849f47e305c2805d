"""What an attack is to an evaluation, and the attack that does nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import Tensor, nn

from atas.attacks._lanes import Search
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
class Staged(Attack, Protocol):
    """An attack that is made of searches, one after the other, each on the examples that are still right.

    An evaluation runs the searches themselves, so that it can tell how far they are, stop, and go on.
    """

    @property
    def stages(self) -> tuple[Search, ...]:
        """The searches in their order."""

    @property
    def counts_clean(self) -> bool:
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
