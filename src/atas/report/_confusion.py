"""What the model takes each class for under attack: predictions at the points that PGD-10 finds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from atas import attacks
from atas.report._subject import Subject, evenly

_SECONDS = 15.0
_PASSES = 11
_MOST = 10_000
_BATCH = 250


@dataclass(frozen=True)
class Confusion:
    """How often each class (row) is taken for each (column) under PGD-10, and on how many images that was seen."""

    counts: Tensor
    classes: tuple[str, ...]
    images: int

    def most(self, count: int) -> list[tuple[str, str, int, int]]:
        """The most frequent mistakes: true class, predicted class, how often, of how many."""
        wrong = self.counts.clone().fill_diagonal_(0)
        values, places = wrong.flatten().topk(min(count, wrong.numel()))
        found = []
        for value, place in zip(values.tolist(), places.tolist(), strict=True):
            row, column = divmod(place, len(self.classes))
            if value:
                found.append((self.classes[row], self.classes[column], value, int(self.counts[row].sum())))
        return found


def confusion(subject: Subject) -> Confusion:
    """Attack test images, as many as a few seconds allow, with PGD-10."""
    test, model, device = subject.data.test, subject.model, subject.device
    count = min(subject.pace.images(_PASSES, _SECONDS, _MOST), len(test))
    threat = subject.evaluation.threat if subject.evaluation is not None else subject.recipe.threat
    classes = len(test.classes)
    counts = torch.zeros(classes, classes, dtype=torch.int64)
    for index in evenly(len(test), count).split(_BATCH):
        x, y = test.images[index].to(device).float() / 255, test.labels[index].to(device).long()
        point = attacks.pgd(model, x, y, threat, steps=10, index=index.to(device))
        with torch.no_grad():
            said = model(point)[:, :classes].argmax(1)
        counts += (y * classes + said).bincount(minlength=classes * classes).view(classes, classes).cpu()
    return Confusion(counts, test.classes, count)
