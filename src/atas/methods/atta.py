"""ATTA: each epoch goes on from the perturbation of the last one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Unpack

import torch
from torch import Tensor, nn

from atas.boxes import AnyView
from atas.errors import UsageError
from atas.fusing import fusable
from atas.memory import LowResolution, Memory, Perturbations, Store
from atas.methods._method import Common, Perturbing
from atas.parts import Part
from atas.passes import input_gradient
from atas.threat import Threat


class Remembering(Perturbing):
    """A method whose attack starts from the perturbation that an example had in the last epoch.

    The memory begins with uniform noise and gets new noise every `reset_every` epochs, as the authors of ATTA and ATAS
    do: at the start of the 10th, 20th, ... epoch, but never for the last. `grid` keeps perturbations on so many cells a
    side instead of every pixel, for images that are shown resampled; `store` is where they live, on the device or on
    the host.
    """

    attack_mode = "eval"
    checks_indices = True

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        reset_every: int,
        dtype: torch.dtype | Literal["auto"],
        grid: int | None = None,
        store: Store = "device",
        **common: Unpack[Common],
    ) -> None:
        super().__init__(threat, examples, shape, **common)
        if reset_every < 1:
            raise UsageError(f"reset_every must be at least 1 epoch; got {reset_every}")
        self.reset_every = reset_every
        if dtype == "auto":
            dtype = torch.int8 if threat.int8_is_enough else torch.float16
        device = common.get("device")
        self.memory: Memory = (
            Perturbations(threat, examples, shape, pad=self.pad, dtype=dtype, device=device, store=store)
            if grid is None
            else LowResolution(threat, examples, shape, grid=grid, dtype=dtype, device=device, store=store)
        )
        self.memory.reset(self.seed, epoch=0)

    def own(self, part: Part) -> None:
        """The memory begins with the noise of these examples."""
        super().own(part)
        self.memory.part = part
        self.memory.reset(self.seed, epoch=0)

    def on_new_epoch(self, epoch: int, epochs: int | None) -> None:
        """Reset the memory when it is due."""
        number = epoch + 1  # as the authors count
        if number % self.reset_every == 0 and epoch > 0 and number != epochs:
            self.memory.reset(self.seed, epoch)

    def prefetch(self, index: Tensor) -> None:
        """Begin to bring the perturbations that live on the host."""
        self.memory.prefetch(index)

    def before_step(self, index: Tensor) -> None:
        """The perturbations are on the device."""
        self.memory.before_step(index)

    def after_step(self, index: Tensor) -> None:
        """The new perturbations go home."""
        self.memory.after_step(index)

    def recall(self, x: Tensor, index: Tensor, view: AnyView) -> Tensor:
        """Where the attack starts: the image with its remembered perturbation."""
        return _recall(self.memory, x, index, view)


@fusable
def _recall(memory: Memory, x: Tensor, index: Tensor, view: AnyView) -> Tensor:
    return memory.threat.project(x + memory.read(index, view, x.dtype), x)


class ATTA(Remembering):
    """Adversarial training with transferable adversarial examples (Zheng et al., 2020), as the paper runs it.

    x(j) = P[x(j-1) + a sgn grad l(x(j-1))], a = 4/255 at every budget, attacked in eval mode. Differences from the
    authors' code, all as in the released ATAS: zero rather than grey padding, uniform noise of size eps rather than
    0.001 N(0, 1) at the start, and a loss that is not divided by the batch size twice.
    """

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        step_size: float | Literal["auto"] = "auto",
        reset_every: int = 10,
        dtype: torch.dtype | Literal["auto"] = "auto",
        grid: int | None = None,
        store: Store = "device",
        **common: Unpack[Common],
    ) -> None:
        super().__init__(
            threat, examples, shape, reset_every=reset_every, dtype=dtype, grid=grid, store=store, **common
        )
        self.step_size = threat.size("step_size", threat.usual(4 / 255, 0.5) if step_size == "auto" else step_size)

    def attack(self, model: nn.Module, x: Tensor, y: Tensor, index: Tensor, view: AnyView) -> Tensor:
        """One step from where the last epoch ended."""
        start = self.recall(x, index, view)
        gradient, _ = input_gradient(model, start, y, self.summed_loss)
        point = self.threat.ascend(start, gradient, self.step_size * self.step_scale, x)
        self.memory.write(index, view, point - x)
        return point
