"""The interfaces `Attack` and `StagedAttack`, the attack `Clean`, and what attacks are built on.

`attack_context` checks the inputs, sets the model to eval mode and freezes its weights. `SearchAttack` makes an attack
of a search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from atas.attacks.losses import resists
from atas.attacks.scheduler import Scheduler, default_batch_size
from atas.attacks.search import Search
from atas.core.arguments import check_argument, describe
from atas.core.autograd import contiguous, cross_entropy_sum, freeze, input_gradient, set_mode
from atas.core.validation import (
    DeviceChecks,
    check_images,
    check_logits,
    check_module,
    check_shapes,
    check_targets,
    explain_precision,
)
from atas.errors import DataError, UsageError
from atas.threat import Linf, Threat


class Attack(Protocol):
    """An attack with fixed settings, called with a model, images, labels and a threat model.

    It keeps no state between calls, moves no tensor to another device, and restores the model. The result for an
    example depends on the seed and the example's index, not on the batch. A targeted evaluation also passes `targets`,
    one class per image; an attack without that argument cannot take part in one.
    """

    @property
    def name(self) -> str:
        """The name in results."""

    def settings(self, threat: Threat) -> dict[str, Any]:
        """Return the settings that reproduce the attack, as plain JSON values."""

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, seed: int = 0, index: Tensor | None = None
    ) -> Tensor:
        """Return adversarial inputs, one per image, with the dtype and device of x."""


@runtime_checkable
class StagedAttack(Attack, Protocol):
    """An attack that consists of searches, each on the examples that earlier ones did not break.

    An evaluation runs the searches itself, so that it can show their progress, stop, and resume.
    """

    @property
    def stages(self) -> tuple[Search, ...]:
        """The searches in order."""

    @property
    def skips_misclassified(self) -> bool:
        """Whether the attack skips images that are misclassified without an attack and counts them as broken."""


@dataclass(frozen=True)
class Clean:
    """No attack: the clean images."""

    name: ClassVar[str] = "clean"

    def settings(self, threat: Threat) -> dict[str, Any]:
        """Return no settings."""
        return {}

    def __call__(
        self, model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, seed: int = 0, index: Tensor | None = None
    ) -> Tensor:
        """Return the images."""
        return x.detach()


def as_threat(value: Threat | float | None) -> Threat | None:
    """Return the threat model that an attack was created for; a plain eps means Linf.

    >>> as_threat(8 / 255)
    Linf(8/255)
    """
    if value is None or isinstance(value, Threat):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(
            f"the first argument of an attack is its threat model, such as atas.Linf(8/255) or 8/255; got "
            f"{describe(value)}: pass settings by name"
        )
    return Linf(value)


def choose_threat(attack: Attack, threat: Threat | None) -> Threat:
    """Return the threat model that an attack was created for or is called with; raise UsageError unless it is one."""
    own: Threat | None = getattr(attack, "threat", None)
    if own is None and threat is None:
        raise UsageError(
            f"the attack '{attack.name}' has no threat model: create it with one, such as "
            f"atas.attacks.{type(attack).__name__}(threat=atas.Linf(8/255))"
        )
    if own is not None and threat is not None and own != threat:
        raise UsageError(f"the attack '{attack.name}' was created for {own}, not for {threat}: leave one of them out")
    return own or threat  # type: ignore[return-value]


def target_classes(targets: Tensor | int, y: Tensor) -> Tensor:
    """Return one target class per image, from one class for all images or one per image.

    >>> target_classes(3, torch.tensor([0, 1])).tolist()
    [3, 3]
    """
    if not isinstance(targets, Tensor):
        if isinstance(targets, list | tuple):
            raise UsageError(
                f"targets must be one class, or a tensor with one class per image; got {describe(targets)}"
            )
        check_argument("targets", targets, int)
        return torch.full_like(y, targets, dtype=torch.int64)
    if targets.shape != y.shape or targets.dtype.is_floating_point or targets.dtype == torch.bool:
        raise DataError(
            f"targets must be one class, or one class per image as integers of shape {tuple(y.shape)}; got "
            f"{describe(targets)}"
        )
    if targets.device != y.device:
        raise DataError(f"the targets are on {targets.device}, the labels on {y.device}: move them with .to()")
    return targets


def step_settings(size: float) -> dict[str, Any]:
    """Return a step size for a result file: in grey levels for people, and exactly.

    >>> step_settings(8 / 255 / 5)["step_size"]
    '1.6/255'
    """
    return {"step_size": f"{size * 255:.6g}/255", "step_size_value": size}


@dataclass(frozen=True)
class AttackTarget:
    """A model under attack, with checked images and labels, or target classes in place of the labels."""

    model: nn.Module
    x: Tensor
    y: Tensor
    index: Tensor
    threat: Threat
    loss: Callable[[Tensor, Tensor], Tensor]
    targeted: bool = False

    def resists(self, logits: Tensor) -> Tensor:
        """Return for which images the attack has failed."""
        return resists(check_logits(logits, len(self.y)), self.y, targeted=self.targeted)

    def step(self, point: Tensor, size: float) -> Tensor:
        """Make one projected gradient ascent step. A NaN in the gradient counts as 0."""
        gradient, _ = input_gradient(self.model, point, self.y, self.loss)
        return self.threat.ascend(point, gradient.nan_to_num(), size, self.x)


@contextmanager
def attack_context(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    index: Tensor | None = None,
    targets: Tensor | int | None = None,
) -> Iterator[AttackTarget]:
    """Check the inputs; set the model to eval mode and freeze its weights until the end of the context.

    With `targets`, these classes take the place of the labels, and the loss falls as the model moves towards them.

    On the CPU a wrong value raises at once. On a GPU it raises at the end of the attack, so that the host does not wait
    for the device between steps.
    """
    check_module(model)
    check_shapes(x, y, index, None)
    classes = y if targets is None else target_classes(targets, y)
    if not isinstance(threat, Threat):
        raise UsageError(f"the threat model is one such as atas.Linf(8/255); got {describe(threat)}")
    for name, tensor in (("labels", y), ("indices", index)):
        if tensor is not None and tensor.device != x.device:
            raise DataError(f"the {name} are on {tensor.device}, the images on {x.device}: move them with .to()")
    # Inference tensors cannot take part in a backward pass: leave inference mode, and copy the inputs.
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        explain_precision(model, x),
        set_mode(model, training=False),
        freeze(model),
    ):
        x = contiguous(x) if x.is_contiguous() else x  # the caller's channels_last stays
        checks = DeviceChecks(x.device)
        if x.numel():
            checks.images(x)

        def loss(output: Tensor, y: Tensor) -> Tensor:
            logits = check_logits(output, len(y))
            if targets is not None and y.device.type == "cpu":
                check_targets(y, logits.shape[1])
            total = cross_entropy_sum(logits, checks.labels(y, logits.shape[1]))
            return total if targets is None else -total

        threat.check_images(x.shape, x.device)
        index = torch.arange(len(x), device=x.device) if index is None else index.long()
        images, classes = x.detach().clone(), classes.to(torch.int64, copy=True)
        yield AttackTarget(model, images, classes, index, threat, loss, targets is not None)
        checks.raise_if_set()


class StagedCall:
    """The call of an attack with `stages`: it skips misclassified images and stops at the first success."""

    skips_misclassified: ClassVar[bool] = True

    def __call__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        threat: Threat | None = None,
        *,
        seed: int = 0,
        index: Tensor | None = None,
        targets: Tensor | int | None = None,
    ) -> Tensor:
        """Return adversarial inputs, or the image itself if it is misclassified already or no search succeeds."""
        attack: Any = self
        return run_stages(attack.stages, model, x, y, choose_threat(attack, threat), seed, index, targets)


class SearchAttack(StagedCall):
    """Makes an attack of one stage of a search."""

    @property
    def stages(self) -> tuple[Search, ...]:
        """The search itself."""
        search: Any = self
        return (search,)


def run_stages(
    stages: tuple[Search, ...],
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat,
    seed: int,
    index: Tensor | None,
    targets: Tensor | int | None = None,
) -> Tensor:
    """Run searches in order, each on the examples that earlier ones did not break; return points like x.

    A point is an adversarial input, or the image itself if it is misclassified already or no search succeeds.
    """
    with attack_context(model, x, y, threat, index, targets) as target:
        if not len(x):
            return target.x
        check_images(target.x)  # before the attack on a GPU too: it takes long
        is_contiguous = x.is_contiguous()

        def verifier(point: Tensor) -> Tensor:
            laid_out = contiguous(point) if is_contiguous else point.contiguous(memory_format=torch.channels_last)
            return check_logits(model(laid_out), len(point))

        scheduler = Scheduler(verifier, verifier, x.device, default_batch_size(x.device))
        examples = scheduler.examples(target.x, target.y, target.index, targeted=target.targeted)
        _, points = scheduler.run_stages(stages, examples, threat, examples.misclassified(), seed=seed)
        return points
