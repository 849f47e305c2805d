"""Accuracy and training time on ImageNet, for people who have it as folders of images.

Settings are the paper's. Three things are not: images are resized by their shorter side, cropped to a square and padded
by black for the random crops, where the authors squeeze them to 256 x 256 and crop 224; perturbations are kept at full
size, where the paper keeps 32 x 32 of them (and the released code none: it stores what it read); and all of it has to
fit the device, so ImageNet as a whole needs a smaller `data.size` or a part of its classes.
"""

from __future__ import annotations

from typing import Any

from atas.reproduce import paper
from atas.reproduce.accuracy_table import AccuracyTable
from atas.reproduce.grid import Grid, digits

_SAME = {
    "data.name": "imagefolder",
    "data.pad": 16,
    "optimizer.weight_decay": 1e-4,
    "training.epochs": 90,
}
_DROPS = {"schedule.name": "piecewise", "schedule.peak": 0.1, "schedule.milestones": [50 / 90, 75 / 90]}
_OWN: dict[str, dict[str, Any]] = {
    "free": {"method.replays": 4, "training.epochs": 45},
    "yopo": {"training.epochs": 36},
    "fgsm-rs": _DROPS,
    "fgsm-ga": _DROPS,
    "atta": _DROPS,
    "atas": {**_DROPS, "method.c": 12.8, "method.clip": [4 / 255, 8 / 255]},
}
_GRAD_ALIGN = {2: 0.005, 4: 0.01}  # the regulariser's weight by budget


def _cell(network: str, method: str, eps: float) -> tuple[str, dict[str, Any]] | None:
    if paper.lookup("imagenet", network, eps, method) is None:
        return None  # did not fit the authors' GPUs
    weight = {"method.weight": _GRAD_ALIGN[round(255 * eps)]} if method == "fgsm-ga" else {}
    values = {**_SAME, "model.name": network, "method.eps": eps, **_OWN[method], **weight}
    return f"cifar10-preact-resnet18-{method}", values


STUDY = AccuracyTable(
    "table-imagenet",
    "the same on ImageNet, eps 2 and 4/255, for those who have it (--root): resnet18 and resnet50, six methods",
    "ImageNet: accuracy and training time",
    Grid(
        "imagenet",
        ("resnet18", "resnet50"),
        tuple(paper.budgets("imagenet")),
        _cell,
        methods=("free", "yopo", "fgsm-rs", "fgsm-ga", "atta", "atas"),
        more=(),
    ),
    digits(),
    notes=(
        "Images are resized and cropped to a square, padded by 16 black pixels for random crops, and perturbations are "
        "kept at full size; the authors squeeze images to 256 x 256, crop 224, and keep 32 x 32 of a perturbation.",
    ),
)
