"""Accuracy of each class, and the confusion between classes under each attack."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from atas.attacks.registry import display_name
from atas.evaluation import Evaluation, EvaluationDetails, wilson
from atas.report.elements import Cell, DataTable, Section, Unavailable, Whisker
from atas.report.formatting import attack_names, format_interval, percent
from atas.report.run_view import RunView

_MATRIX_UP_TO = 20  # classes; a larger matrix is unreadable
_MISTAKES = 15


@dataclass(frozen=True)
class ConfusionView:
    """The confusion under one attack: its most frequent mistakes in words, and a table."""

    attack: str
    title: str
    num_images: int
    num_nan: int
    mistakes: str
    table: DataTable


@dataclass(frozen=True)
class ConfusionMatrix:
    """Counts of true class (row) and predicted class (column)."""

    counts: Tensor
    classes: tuple[str, ...]

    @classmethod
    def count(cls, labels: Tensor, predicted: Tensor, classes: tuple[str, ...]) -> ConfusionMatrix:
        """Count the predictions that are classes.

        >>> import torch
        >>> ConfusionMatrix.count(torch.tensor([0, 0, 1]), torch.tensor([0, 1, -1]), ("a", "b")).counts.tolist()
        [[1, 1], [0, 0]]
        """
        size, known = len(classes), predicted >= 0
        counts = (labels[known] * size + predicted[known]).bincount(minlength=size * size)
        return cls(counts.view(size, size), classes)

    def top_mistakes(self, count: int) -> list[tuple[str, str, int, int]]:
        """Return the most frequent mistakes: true class, predicted class, count, images of the true class."""
        wrong = self.counts.clone().fill_diagonal_(0).flatten()
        order = wrong.argsort(descending=True, stable=True)[:count]
        mistakes = []
        for position in order.tolist():
            row, column = divmod(position, len(self.classes))
            if times := int(wrong[position]):
                mistakes.append((self.classes[row], self.classes[column], times, int(self.counts[row].sum())))
        return mistakes


def classes_section(view: RunView) -> Section:
    """Return accuracy by class and the confusion under each attack."""
    stored = view.details
    if isinstance(stored, Unavailable):
        context: dict[str, object] = {"by_class": stored, "confusions": []}
    else:
        confusions = _confusions(*stored)
        context = {
            "by_class": _by_class(*stored),
            "confusions": confusions,
            "titles": {confusion.attack: display_name(confusion.attack) for confusion in confusions},
            "chosen": confusions[-1].attack if confusions else None,
        }
    return Section("classes", "Classes", "classes", context)


def _class_names(details: EvaluationDetails) -> tuple[str, ...]:
    """Return names of all classes that are a label or were predicted."""
    largest = max(int(values.max()) for values in (details.labels, *details.predicted.values()))
    return tuple(details.class_name(label) for label in range(max(len(details.classes), largest + 1)))


def _by_class(evaluation: Evaluation, details: EvaluationDetails) -> DataTable:
    attacks = ["clean", *attack_names(evaluation)]
    columns = attacks if len(attacks) < 2 else [*attacks, "worst"]
    rows: list[list[Cell | str]] = []
    for number, label in enumerate(_class_names(details)):
        members = details.labels == number
        n = int(members.sum())
        if not n:
            continue
        counts = [int(evaluation.correct[name][members].sum()) for name in columns]
        accuracy, interval = counts[-1] / n, wilson(counts[-1], n)
        rows.append(
            [
                Cell(label, sort=number),
                Cell(str(n), sort=n),
                *(Cell(percent(count / n), sort=count / n) for count in counts),
                Cell(format_interval(interval), sort=interval[0]),
                Cell(whisker=Whisker(accuracy, interval), sort=accuracy),
            ]
        )
    head = ["class", "images", *map(display_name, columns), "95% interval", ""]
    caption = (
        f"Accuracy of each class in percent, on {evaluation.n:,} test images. The worst case counts images that are "
        "robust to all attacks that were run; the interval is of the last accuracy"
    )
    return DataTable(head, rows, caption, sortable=True)


def _confusions(evaluation: Evaluation, details: EvaluationDetails) -> list[ConfusionView]:
    """Return the confusion without an attack and under each, as far as predictions were stored."""
    classes = _class_names(details)
    return [
        _confusion(name, ConfusionMatrix.count(details.labels, details.predicted[name], classes), evaluation.n)
        for name in ("clean", *attack_names(evaluation))
        if name in details.predicted
    ]


def _confusion(attack: str, matrix: ConfusionMatrix, num_images: int) -> ConfusionView:
    mistakes = ", ".join(f"{true} as {other} ({count} of {n})" for true, other, count, n in matrix.top_mistakes(3))
    how = "without an attack" if attack == "clean" else f"under {display_name(attack)}"
    table = _matrix(matrix, how) if len(matrix.classes) <= _MATRIX_UP_TO else _mistakes(matrix, how)
    num_nan = num_images - int(matrix.counts.sum())
    return ConfusionView(attack, how[0].upper() + how[1:], num_images, num_nan, mistakes, table)


def _mistakes(matrix: ConfusionMatrix, how: str) -> DataTable:
    """List the most frequent mistakes, for data with many classes."""
    rows = [[true, other, str(count), str(n)] for true, other, count, n in matrix.top_mistakes(_MISTAKES)]
    head = ["true class", "predicted", "times", "of"]
    return DataTable(head, rows, f"The most frequent mistakes {how}", text_columns=2)


def _matrix(matrix: ConfusionMatrix, how: str) -> DataTable:
    rows: list[list[Cell | str]] = []
    for number, label in enumerate(matrix.classes):
        counts = matrix.counts[number].tolist()
        total = sum(counts) or 1
        cells = [
            Cell(
                str(count) if count else "",
                style=f"--share:{100 * count / total:.0f}%",
                title=f"{label} predicted as {matrix.classes[other]}: {count} of {total}",
                class_="right" if other == number else "heat",
            )
            for other, count in enumerate(counts)
        ]
        rows.append([label, *cells])
    return DataTable(
        ["", *matrix.classes], rows, f"True classes (rows) and predicted classes (columns) {how}", class_="matrix"
    )
