"""Accuracy and training time on ImageNet, which the user must have.

Every cell is a recipe. Its comments tell the paper's settings from ours, mostly the schedules of the baselines, for
which the paper names only the epochs. The recipes read a packed set that squashes images to 256 x 256, as the authors
do; `--set data.name=imagefolder` with `--root` reads a folder of images.
"""

from __future__ import annotations

from atas.paper.accuracy_table import AccuracyTable
from atas.paper.grid import digits, imagenet

STUDY = AccuracyTable(
    "table-imagenet",
    "the same on ImageNet, eps 2 and 4/255, for those who have it (--root): resnet18 and resnet50, six methods",
    "ImageNet: accuracy and training time",
    imagenet(),
    digits(),
    notes=(
        "Images are stored at 256 x 256 and shown as crops of 224, in an evaluation the centre; perturbations are kept "
        "at 32 x 32. The released code loses what it should write back of a perturbation; here it is written. The "
        "schedules of free, yopo, fgsm-rs and fgsm-ga are not in the paper, but for the epochs.",
    ),
)
