"""ATAS, the method of the paper, and the whole of it: remember, look at the gradient, step inversely to its norm.

For every training example i two things outlive the epoch: its perturbation, and a moving average v of its squared
gradient norm. A step of training on image x, label y is

    x0 = P[x + remembered perturbation]                      where the last epoch ended
    g  = gradient of l(x0, y) by x0                          model in eval mode, input gradient alone
    v <- beta v + (1 - beta) |g|^2
    a  = gamma / (c + sqrt v)                                small where the loss is steep
    x1 = P[x0 + a sgn g]                                     remembered for the next epoch
    one step of SGD on l(x1, y)                              model in train mode

Examples with a large gradient norm are those that make single-step training collapse; they get small steps, and
because every epoch goes on from the last, small steps still reach the whole ball. Cost: two forward and backward
passes, one of them without weight gradients, so 5/3 of ordinary training.

`ATAS` is what the authors released: a constant step eps in the first epochs, and steps clipped to [4, 14]/255, neither
of which the paper mentions. `ATASLiteral` is Algorithm 1 as printed, with the settings of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Unpack

import torch
from torch import Tensor, nn

from atas.boxes import AnyView
from atas.errors import UsageError
from atas.fusing import fusable
from atas.memory import GradientNorms, Store
from atas.methods._adaptive import Adaptive, adaptive_step, check_adaptive
from atas.methods._method import Common
from atas.methods.atta import Remembering
from atas.passes import input_gradient
from atas.threat import Threat


class ATAS(Adaptive, Remembering):
    """Fast adversarial training with adaptive step size (Huang et al., 2022), as the authors released it.

    `max_step` is the paper's gamma/c and `c` its c on the summed loss (the paper's 0.01 is 1.28 here, because it was
    set on the mean over batches of 128). `clip` bounds the step size; `warmup_epochs` take a constant step eps. For an
    L2 ball, `max_step` and `clip` default to 2 eps and (0.5, 1.75) eps and the memory to float16; for Linf to 16/255,
    (4/255, 14/255) and int8. For large images that are shown resampled, `grid=32` keeps perturbations on a grid of
    32 x 32; `store="host"` keeps them in the host's memory.

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
        c: float = 1.28,
        max_step: float | Literal["auto"] = "auto",
        beta: float = 0.5,
        clip: tuple[float, float] | Literal["auto"] | None = "auto",
        warmup_epochs: int = 5,
        reset_every: int = 10,
        pad: int = 4,
        dtype: torch.dtype | Literal["auto"] = "auto",
        grid: int | None = None,
        store: Store = "device",
        device: torch.device | str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            threat,
            examples,
            shape,
            reset_every=reset_every,
            dtype=dtype,
            grid=grid,
            store=store,
            pad=pad,
            device=device,
            seed=seed,
        )
        self.c, self.beta, self.warmup_epochs = c, beta, warmup_epochs
        self.max_step = threat.usual(16 / 255, 2.0) if max_step == "auto" else max_step
        self.clip = (threat.usual(4 / 255, 0.5), threat.usual(14 / 255, 1.75)) if clip == "auto" else clip
        check_adaptive(threat, self.c, self.max_step, self.beta)
        if warmup_epochs < 0:
            raise UsageError(f"warmup_epochs must not be negative; got {warmup_epochs}")
        if self.clip is not None:
            low, high = (threat.size("clip", end) for end in self.clip)
            if low > high:
                raise UsageError(f"clip must be (smallest, largest) step with smallest <= largest; got {self.clip}")
        self.norms = GradientNorms(examples, device=device)

    def attack(self, model: nn.Module, x: Tensor, y: Tensor, index: Tensor, view: AnyView) -> Tensor:
        """One adaptive step from where the last epoch ended; perturbation, average and step size are remembered."""
        start = self.recall(x, index, view)
        gradient, _ = input_gradient(model, start, y, self.summed_loss)
        return _climb_and_remember(self, x, index, view, start, gradient)

    def climb(self, x: Tensor, start: Tensor, gradient: Tensor, average: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The heart, a function of tensors alone: the new point, average and step size of each example."""
        size, adapted = adaptive_step(gradient, average, c=self.c, max_step=self.max_step, beta=self.beta)
        if self.clip is not None:
            size = size.clamp(*self.clip)
        warming = self.epoch < self.warmup_epochs
        size = torch.where(warming, self.threat.eps, size) * self.step_scale
        average = torch.where(warming, average, adapted)
        return self.threat.ascend(start, gradient, size, x), average, size


@fusable
def _climb_and_remember(
    method: ATAS, x: Tensor, index: Tensor, view: AnyView, start: Tensor, gradient: Tensor
) -> Tensor:
    point, average, size = method.climb(x, start, gradient, method.norms.average[index])
    method.memory.write(index, view, point - x)
    method.norms.write(index, average, size)
    return point


class ATASLiteral(ATAS):
    """Algorithm 1 of the paper as printed: steps are neither clipped nor warmed up.

    Inputs are still clamped to [0, 1], and the perturbations reset every 10 epochs, as the text says.
    """

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        c: float = 1.28,
        max_step: float | Literal["auto"] = "auto",
        beta: float = 0.5,
        reset_every: int = 10,
        dtype: torch.dtype | Literal["auto"] = "auto",
        grid: int | None = None,
        store: Store = "device",
        **common: Unpack[Common],
    ) -> None:
        super().__init__(
            threat,
            examples,
            shape,
            c=c,
            max_step=max_step,
            beta=beta,
            clip=None,
            warmup_epochs=0,
            reset_every=reset_every,
            dtype=dtype,
            grid=grid,
            store=store,
            **common,
        )
