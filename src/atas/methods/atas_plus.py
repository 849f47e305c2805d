"""ATAS+: ATAS with targets that remember what the model predicted.

This file joins the step of `atas.py` with `RememberedPredictions` of `targets.py`; `atas.py` says where the rest is.

ATAS keeps a perturbation for every example between epochs; ATAS+ keeps the predictions at the perturbed points too. A
training step on image x with label y is

    x1 = the adaptive step of ATAS                           from where the last epoch ended
    t  = (1 - share) softened y + share q                    q is the average of earlier predictions; softened by 0.1
    one SGD step on the cross-entropy of f(x1) with t        model in train mode
    q <- decay q + (1 - decay) softmax f(x1)                 stored for the next epoch

With a falling learning rate a model begins to fit its training examples one by one, and loses robustness on others. The
average of its predictions over earlier epochs changes slowly, so it is meant to hold the model back there. It costs no
pass, one row of `classes` numbers per example, and nothing in evaluation.

Its recipes use averaged weights (`training.ema`) and a cyclic learning rate that ends above zero (`schedule.final`),
because an average gains little once the weights no longer move.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from atas.methods.atas import ATAS, ATASArgs
from atas.methods.targets import RememberedPredictions
from atas.threat import Threat


class ATASPlus(ATAS):
    """ATAS with label smoothing and remembered predictions.

    `classes` is the number of the model's outputs; `atas.train` passes it. From `from_epoch` on, `share` of
    the targets is the average of the model's predictions; `decay` is that of the average. The other settings are those
    of ATAS. In a loop of your own the loss is `method.loss(logits, y, index)`.

    >>> from atas import Linf
    >>> method = ATASPlus(Linf(8/255), examples=100, shape=(3, 32, 32), classes=10)
    >>> method.start_epoch(0, epochs=30)
    """

    own_targets = ("smoothing", "share", "decay", "from_epoch")

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        classes: int,
        smoothing: float = 0.1,
        share: float = 0.4,
        decay: float = 0.7,
        from_epoch: int = 5,
        **settings: Unpack[ATASArgs],
    ) -> None:
        self.check_own_parts(settings)
        settings["targets"] = RememberedPredictions(
            classes, share=share, decay=decay, from_epoch=from_epoch, smoothing=smoothing
        )
        super().__init__(threat, examples, shape, **settings)
