"""How much work a trial is, roughly, to tell how long a plan will take.

In forward passes of one image through PreActResNet-18; a backward pass to the image costs as much again, one to the
weights too costs twice that.
"""

from __future__ import annotations

import re

from atas.reproduce.trial import Trial

_NETWORKS = {"preact-resnet18": 1.0, "wrn-28-10": 9.4, "resnet18": 3.3, "resnet50": 7.4, "small-cnn": 0.005}
_METHODS = {"standard": 3.0, "fgsm-ga": 12.0, "ssat": 7.0, "free": 24.0, "yopo": 18.0, "pgd": 23.0, "trades": 26.0}
_ONE_STEP = 5.0
_ATTACKS = {"fgsm": 2.0, "autoattack": 4000.0, "autoattack-rand": 3000.0}  # of examples, half hold to the end
_SEARCH = 1000.0


def training_cost(trial: Trial, images: int) -> float:
    """Of the training, on so many images."""
    settings = trial.settings
    each = _METHODS.get(settings.method.name, _ONE_STEP)
    return settings.training.epochs * images * each * _NETWORKS.get(settings.model.name, 1.0)


def evaluation_cost(trial: Trial, attacks: tuple[str, ...], images: int) -> float:
    """Of an evaluation with these attacks on so many images."""
    size = (1 + trial.padding / 16) ** 2  # images of 32 pixels a side
    return images * size * sum(map(_passes, attacks)) * _NETWORKS.get(trial.settings.model.name, 1.0)


def _passes(attack: str) -> float:
    if match := re.fullmatch(r"pgd(\d+)(?:x(\d+))?", attack):
        return 2.0 * int(match[1]) * int(match[2] or 1)
    return _ATTACKS.get(attack, _SEARCH)
