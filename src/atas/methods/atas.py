"""ATAS: persistent perturbations and step sizes inverse to the gradient norm.

For every training example two things are kept between epochs: its perturbation, and a moving average v of its squared
gradient norm, which starts at 0. A training step on image x with label y is

    x0 = P[x + stored perturbation]                          start where the last epoch ended
    g  = gradient of l(x0, y) with respect to x0             model in eval mode, input gradient only
    in the first `warmup_epochs`:  a = eps                   and v stays as it is
    afterwards:  v <- beta v + (1 - beta) |g|^2
                 a  = max_step / (1 + sqrt(v) / c)           small where the loss is steep
                 a <- a clipped to [clip[0], clip[1]]
    x1 = P[x0 + a sgn g]                                     stored for the next epoch
    one SGD step on l(x1, y)                                 model in train mode

max_step is the step at zero gradient; the paper writes a = gamma / (c + sqrt v), with gamma = c max_step. This file has
the step. The start, the resets, and the weight update are in `methods/base.py` (`PersistentPerturbation`,
`InputPerturbation`); how perturbations are stored is in `core/perturbations.py`.

The paper's explanation: examples with a large gradient norm make single-step training collapse, so they get small
steps. Each epoch continues from the last one, so small steps still reach the whole ball. By counting passes, the cost
is 5/3 of standard training: two forward and two backward passes, one of them without weight gradients.

`ATAS` is what the authors released: with warm-up, and steps clipped to [4, 14]/255, which the paper does not mention.
`ATASLiteral` is Algorithm 1 as printed, with the settings of the text: neither warm-up nor clip.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, Unpack

import torch
from torch import Tensor, nn

from atas.core.arguments import describe
from atas.core.dispatch import fast_op
from atas.core.perturbations import Placement
from atas.core.resized_crop import AnyView
from atas.data.loader import Batch
from atas.errors import UsageError
from atas.methods.base import AttackMode, CommonArgs, PersistentPerturbation
from atas.methods.consistency import Consistency
from atas.methods.step_warnings import warn_of_adaptive_steps
from atas.methods.targets import LabelTargets
from atas.threat import EpsMultiple, Linf, Size, Threat, l2_norm

Bound = float | EpsMultiple  # of the step size, as a setting
_RELEASED_C = 1.28  # at 8/255, for images of 3 x 32 x 32 pixels


def update_squared_norm(squared_norm: Tensor, gradient: Tensor, *, beta: float) -> Tensor:
    """Return v <- beta v + (1 - beta) |g|^2, the average of each example's squared gradient norm.

    Computed in float32 or wider.
    """
    return beta * squared_norm + (1 - beta) * l2_norm(gradient).square().to(squared_norm.dtype)


def adaptive_step_size(squared_norm: Tensor, *, c: float, max_step: float) -> Tensor:
    """Return a = gamma / (c + sqrt v) for each example, written with max_step = gamma / c, the step at zero gradient.

    The gradient is that of the summed loss, so c = 1.28 is the paper's 0.01, which was set on the mean over 128
    examples.
    """
    return max_step / (1 + squared_norm.sqrt() / c)


class AdaptiveStep(NamedTuple):
    """Result of an adaptive step: the perturbed inputs, and each example's new squared norm and step size."""

    inputs: Tensor
    squared_norm: Tensor
    step_size: Tensor


class GradientNorms(nn.Module):
    """The average of every example's squared gradient norm, and its last step size."""

    average: Tensor  # the name in saved states; the code says `squared_norm`
    step_size: Tensor

    def __init__(self, examples: int, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(examples, device=device))
        self.register_buffer("step_size", torch.zeros(examples, device=device))

    @property
    def squared_norm(self) -> Tensor:
        """The average of every example's squared gradient norm: v."""
        return self.average

    def store(self, index: Tensor, squared_norm: Tensor, step_size: Tensor) -> None:
        """Store the new squared norms and step sizes of these examples."""
        self.squared_norm[index] = squared_norm.to(self.squared_norm.dtype)
        self.step_size[index] = step_size.to(self.step_size.dtype)


class AdaptiveStepSizes:
    """Mixin of methods with adaptive step sizes: what they report of every example."""

    norms: GradientNorms

    @property
    def step_sizes(self) -> Tensor:
        """The last step size of every example in pixel units; zero before its first step."""
        return self.norms.step_size

    @property
    def gradient_norms(self) -> Tensor:
        """The square root of v for every example."""
        return self.norms.squared_norm.sqrt()


def gradient_scale(threat: Threat, shape: Sequence[int], c: float | Literal["auto"]) -> float:
    """Return `c`; "auto" is the released 1.28 scaled from 8/255 and 3 x 32 x 32 pixels to this ball.

    A rough rule: a model that withstands the ball has a loss that rises across it by a similar amount on any data. This
    rise is the gradient norm times the radius of the ball. So gradient norms, and c with them, are inverse to the
    radius.
    """
    if c != "auto":
        return c
    radius = threat.radius(shape)
    return _RELEASED_C * (Linf(8 / 255).radius((3, 32, 32)) / radius) if radius else _RELEASED_C


def check_adaptive_settings(c: float, beta: float) -> None:
    """Raise if these settings give no step size."""
    if not (0 < c < math.inf and 0 <= beta < 1):
        raise UsageError(f"adaptive steps need c > 0 and 0 <= beta < 1; got {c=}, {beta=}")


def _clip_sizes(threat: Threat, clip: tuple[Bound, Bound] | Literal["auto"] | None) -> tuple[float, float] | None:
    """Return the bounds of the step size in pixel units."""
    if clip is None:
        return None
    if clip != "auto" and (not isinstance(clip, tuple | list) or len(clip) != 2):
        raise UsageError(f"clip must be (smallest, largest) step, 'auto' or None; got {describe(clip)}")
    smallest, largest = (None, None) if clip == "auto" else clip
    low, high = threat.size("clip", smallest, auto=0.5), threat.size("clip", largest, auto=1.75)
    if low > high:
        raise UsageError(f"clip must be (smallest, largest) step with smallest <= largest; got {clip}")
    return low, high


class ATAS(AdaptiveStepSizes, PersistentPerturbation):
    """Fast adversarial training with adaptive step size (Huang et al., 2022), as the authors released it.

    `max_step` is the step at zero gradient, the paper's gamma/c, and `c` its c on the summed loss (the paper's 0.01 is
    1.28 here, because it was set on the mean over batches of 128); "auto" scales 1.28 to other budgets and sizes of
    images. `clip` bounds the step size. The first `warmup_epochs` take a constant step eps. `max_step` and `clip`
    default to 2 eps and (0.5, 1.75) eps: at 8/255 the released 16/255 and (4/255, 14/255). Perturbations default to
    int8 for Linf and to float16 for L2. For large images that are resampled, `grid=32` keeps them on a grid of 32 x 32.
    `store="host"` keeps them in host memory. `attack_mode="train"` attacks in train mode instead of eval mode.
    `write_back=False` never stores a perturbation, as the released code for ImageNet.

    >>> from atas import ATAS, Linf
    >>> method = ATAS(Linf(8/255), examples=100, shape=(3, 32, 32))
    >>> method.start_epoch(0, epochs=30)
    """

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        c: float | Literal["auto"] = 1.28,
        max_step: Size = "auto",
        beta: float = 0.5,
        clip: tuple[Bound, Bound] | Literal["auto"] | None = "auto",
        warmup_epochs: int = 5,
        reset_every: int = 10,
        pad: int = 4,
        dtype: torch.dtype | Literal["auto"] = "auto",
        grid: int | None = None,
        store: Placement = "device",
        write_back: bool = True,
        attack_mode: AttackMode = "auto",
        device: torch.device | str | None = None,
        seed: int = 0,
        targets: LabelTargets | None = None,
        consistency: Consistency | None = None,
    ) -> None:
        super().__init__(
            threat,
            examples,
            shape,
            reset_every=reset_every,
            dtype=dtype,
            grid=grid,
            store=store,
            write_back=write_back,
            attack_mode=attack_mode,
            pad=pad,
            device=device,
            seed=seed,
            targets=targets,
            consistency=consistency,
        )
        self.c, self.beta, self.warmup_epochs = gradient_scale(threat, shape, c), beta, warmup_epochs
        self.max_step, self.clip = threat.size("max_step", max_step, auto=2.0), _clip_sizes(threat, clip)
        check_adaptive_settings(self.c, self.beta)
        if warmup_epochs < 0:
            raise UsageError(f"warmup_epochs must not be negative; got {warmup_epochs}")
        self.settings_warning = warn_of_adaptive_steps(threat, self.max_step, self.clip)
        self.norms = GradientNorms(examples, device=device)

    def attack(self, model: nn.Module, batch: Batch) -> Tensor:
        """Take one adaptive step from where the last epoch ended; store perturbation, squared norm and step size."""
        start = self.load_start(batch.x, batch.index, batch.view)
        gradient = self.start_gradient(model, start, batch.y)
        if self.write_back:
            return adaptive_step_and_store(self, batch.x, batch.index, batch.view, start, gradient)
        inputs, squared_norm, step_size = self.adaptive_update(
            batch.x, start, gradient, self.norms.squared_norm[batch.index]
        )
        self.norms.store(batch.index, squared_norm, step_size)
        return inputs

    def adaptive_update(self, x: Tensor, start: Tensor, gradient: Tensor, squared_norm: Tensor) -> AdaptiveStep:
        """Return the perturbed inputs, squared norms and step sizes of a step from `start`; store nothing."""
        updated = update_squared_norm(squared_norm, gradient, beta=self.beta)
        size = adaptive_step_size(updated, c=self.c, max_step=self.max_step)
        if self.clip is not None:
            size = size.clamp(*self.clip)
        warming = self.epoch < self.warmup_epochs
        size = torch.where(warming, self.threat.eps, size) * self.step_scale
        squared_norm = torch.where(warming, squared_norm, updated)
        return AdaptiveStep(self.threat.ascend(start, gradient, size, x), squared_norm, size)


@fast_op
def adaptive_step_and_store(
    method: ATAS, x: Tensor, index: Tensor, view: AnyView, start: Tensor, gradient: Tensor
) -> Tensor:
    """Take the adaptive step of `method`; store perturbation, squared norm and step size."""
    inputs, squared_norm, step_size = method.adaptive_update(x, start, gradient, method.norms.squared_norm[index])
    method.norms.store(index, squared_norm, step_size)
    method.memory.store(index, view, inputs - x)
    return inputs


class ATASLiteralArgs(CommonArgs, total=False):
    """Settings of `ATASLiteral`, with the defaults of `ATAS`."""

    c: float | Literal["auto"]
    max_step: Size
    beta: float
    reset_every: int
    dtype: torch.dtype | Literal["auto"]
    grid: int | None
    store: Placement


class ATASArgs(ATASLiteralArgs, total=False):
    """Settings of `ATAS` that `ATASPlus` has too, with the same defaults."""

    clip: tuple[Bound, Bound] | Literal["auto"] | None
    warmup_epochs: int


class ATASLiteral(ATAS):
    """Algorithm 1 of the paper as printed: steps are neither clipped nor warmed up.

    Inputs are still clamped to [0, 1], and the perturbations reset every 10 epochs, as the text says.
    """

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        **settings: Unpack[ATASLiteralArgs],
    ) -> None:
        super().__init__(threat, examples, shape, clip=None, warmup_epochs=0, **settings)
