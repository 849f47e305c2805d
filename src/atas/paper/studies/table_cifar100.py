"""Accuracy and training time on CIFAR-100: the paper's main table and its appendix."""

from __future__ import annotations

from atas.paper import published
from atas.paper.accuracy_table import AccuracyTable
from atas.paper.grid import cifar, digits
from atas.sweeps.padded_evaluation import NOTE

STUDY = AccuracyTable(
    "table-cifar100",
    "the same on CIFAR-100, eps 4, 8 and 12/255",
    "CIFAR-100: accuracy and training time",
    cifar("cifar100", tuple(published.budgets("cifar100"))),
    digits(),
    notes=(NOTE,),
)
