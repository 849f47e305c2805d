"""Accuracy and training time on CIFAR-10: the paper's main table and its appendix."""

from __future__ import annotations

from atas.paper import published
from atas.paper.accuracy_table import AccuracyTable
from atas.paper.grid import cifar, digits
from atas.sweeps.padded_evaluation import NOTE

STUDY = AccuracyTable(
    "table-cifar10",
    "accuracy and time of eight methods on CIFAR-10, two networks, eps 8, 12 and 16/255",
    "CIFAR-10: accuracy and training time",
    cifar("cifar10", tuple(published.budgets("cifar10"))),
    digits(),
    notes=(NOTE,),
)
