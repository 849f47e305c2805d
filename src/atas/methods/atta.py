"""ATTA: each epoch continues from the perturbations of the last one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Unpack

import torch
from torch import Tensor, nn

from atas.core.perturbations import Placement
from atas.data.loader import Batch
from atas.methods.base import AttackMode, CommonArgs, PersistentPerturbation
from atas.methods.step_warnings import warn_of_steps
from atas.threat import Size, Threat


class ATTA(PersistentPerturbation):
    """Adversarial training with transferable adversarial examples (Zheng et al., 2020), as the paper runs it.

    x(j) = P[x(j-1) + a sgn grad l(x(j-1))] with a = eps/2, attacked in eval mode; the paper has 4/255 at every
    budget, which is eps/2 at 8/255. Differences from the authors' code, as in the released ATAS: zero instead of
    grey padding, a start of uniform noise of size eps instead of 0.001 N(0, 1), and a loss that is divided by the
    batch size once, not twice.
    """

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        step_size: Size = "auto",
        reset_every: int = 10,
        dtype: torch.dtype | Literal["auto"] = "auto",
        grid: int | None = None,
        store: Placement = "device",
        write_back: bool = True,
        attack_mode: AttackMode = "auto",
        **common: Unpack[CommonArgs],
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
            **common,
        )
        self.step_size = threat.size("step_size", step_size, auto=0.5)
        self.settings_warning = warn_of_steps(threat, self.step_size)

    def attack(self, model: nn.Module, batch: Batch) -> Tensor:
        """Take one step from where the last epoch ended."""
        start = self.load_start(batch.x, batch.index, batch.view)
        gradient = self.start_gradient(model, start, batch.y)
        point = self.threat.ascend(start, gradient, self.step_size * self.step_scale, batch.x)
        if self.write_back:
            self.memory.store(batch.index, batch.view, point - batch.x)
        return point
