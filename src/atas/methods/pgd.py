"""PGD adversarial training, the strong and slow reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from torch import Tensor, nn

from atas.core.arguments import check_count
from atas.core.autograd import input_gradient
from atas.data.loader import Batch
from atas.methods.base import AttackMode, CommonArgs, InputPerturbation
from atas.methods.step_warnings import warn_of_steps
from atas.threat import Size, Threat


class PGD(InputPerturbation):
    """Several steps from a random start (Madry et al., 2018): x(k+1) = P[x(k) + a sgn grad l(x(k))].

    Ten steps of eps/4, attacked in train mode, so every step updates the running statistics of BatchNorm. The paper
    states neither the step size nor the schedule of its PGD-10 row; these are common choices. A PGD attack that the
    released code of ATAS has, but does not use, is in eval mode: `attack_mode="eval"`.
    """

    has_start = True

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        steps: int = 10,
        step_size: Size | None = None,
        attack_mode: AttackMode = "auto",
        **common: Unpack[CommonArgs],
    ) -> None:
        super().__init__(threat, examples, shape, **common)
        self.set_attack_mode(attack_mode)
        self.steps = check_count("steps", steps)
        self.step_size = threat.size("step_size", step_size, auto=0.25)
        self.settings_warning = warn_of_steps(threat, self.step_size, steps)

    def attack(self, model: nn.Module, batch: Batch) -> Tensor:
        """Take all steps, each projected."""
        point = self.threat.random_start(batch.x, self.rng(batch.index))
        for number in range(self.steps):
            if number == 0:
                gradient = self.start_gradient(model, point, batch.y)
            else:
                gradient, _ = input_gradient(model, point, batch.y, self.attack_loss)
            point = self.threat.ascend(point, gradient, self.step_size * self.step_scale, batch.x)
        return point
