"""FGSM-MEP with ConvergeSmooth: the attack of `fgsm_pgi` and the constraint of `convergesmooth`.

Zhao et al., "Fast Adversarial Training with Smooth Convergence", ICCV 2023. In the authors' code the term that FGSM-PGI
adds to the loss is off unless an option is given: here `weight` is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from torch import Tensor, nn

from atas.data.loader import Batch
from atas.methods.convergesmooth import DROPS, ConvergeSmooth
from atas.methods.fgsm_pgi import FGSMPGI, PGIArgs
from atas.threat import Threat


class FGSMMEPCS(ConvergeSmooth, FGSMPGI):
    """FGSM-PGI (FGSM-MEP) with ConvergeSmooth (Zhao et al., 2023).

    `weight` is that of FGSM-PGI's consistency term, which the authors leave out by default (they have 10 with it). The
    other settings are those of `FGSMRSCS` and `FGSMPGI`.
    """

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        gamma: float = 0.03,
        ratio: float = 1.0,
        stride: int = 1,
        drops: tuple[float, ...] = DROPS,
        smoothing: float = 0.4,
        weight: float = 0.0,
        reset_every: int = 40,
        **settings: Unpack[PGIArgs],
    ) -> None:
        super().__init__(
            threat, examples, shape, smoothing=smoothing, weight=weight, reset_every=reset_every, **settings
        )
        if not weight:
            self.consistency = None  # so no weights are trained at the start
        self.setup_constraint(gamma, ratio, stride, drops)

    def attack(self, model: nn.Module, batch: Batch) -> Tensor:
        """Take one step from the stored perturbation."""
        self.unattacked = batch.x
        return super().attack(model, batch)
