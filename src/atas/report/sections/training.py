"""The training by epoch: accuracy on the monitor's images, loss and learning rate, with what happened marked."""

from __future__ import annotations

from typing import Any

from atas.report._chart import Chart, Line, Mark
from atas.report._html import Content, tag
from atas.report._section import Section
from atas.report._subject import Subject

CURVES = (("clean", "clean", "c0"), ("fgsm", "FGSM", "c1"), ("pgd10", "PGD-10", "c2"))
_SYNC = "epochs"


def section(subject: Subject) -> Section:
    """Three charts over the same epochs."""
    rows = subject.summary.epochs
    epochs = [row["epoch"] + 1 for row in rows]
    marks = marks_of(subject)
    accuracy = [Line(label, column(rows, key, 100), colour, dashed=key == "clean") for key, label, colour in CURVES]
    accuracy.append(Line("training examples", column(rows, "train_accuracy", 100), "c3", dashed=True, shown=False))
    charts = [
        Chart(
            "Accuracy of the monitor's images",
            "epoch",
            "accuracy, %",
            epochs,
            accuracy,
            marks=marks,
            limits=(0, 100),
            sync=_SYNC,
            note=f"Up to {subject.recipe.training.probe:,} training images, attacked after every epoch. When training "
            "collapses, FGSM accuracy rises and PGD-10 accuracy falls to nothing.",
        ),
        Chart(
            "Training loss",
            "epoch",
            "loss",
            epochs,
            [Line("loss", column(rows, "loss"), "c4")],
            marks=marks,
            limits=(0, None),
            digits=3,
            sync=_SYNC,
            note="On the examples as the method perturbed them, the mean over the epoch.",
        ),
        Chart(
            "Learning rate",
            "epoch",
            "rate",
            epochs,
            [Line("rate", column(rows, "rate"), "c5")],
            limits=(0, None),
            digits=4,
            sync=_SYNC,
            note="After the last update of the epoch.",
        ),
    ]
    first, *others = [chart.html() for chart in charts]
    return Section("training", "The training", [_collapse(subject), first, tag("div", others, class_="pair")])


def column(rows: list[dict[str, Any]], key: str, scale: float = 1) -> list[float | None]:
    """A figure of every epoch; None where an older version did not write it."""
    return [scale * row[key] if isinstance(row.get(key), int | float) else None for row in rows]


def marks_of(subject: Subject) -> list[Mark]:
    """What happened during training, at its epoch."""
    found = []
    for event in subject.summary.events:
        if event["event"] == "rollback":
            found.append(Mark(event["to_epoch"] + 0.5, "rolled back"))
        elif event["event"] == "stop":
            found.append(Mark(event["to_epoch"], "stopped"))
        elif event["event"] == "breakdown":
            found.append(Mark(event["epoch"] + 1, "broke down"))
    if subject.summary.collapsed_in:
        found.append(Mark(subject.summary.collapsed_in, "collapse"))
    return found


def _collapse(subject: Subject) -> Content:
    events = {event["event"]: event for event in reversed(subject.summary.events)}
    collapse, breakdown = events.get("collapse"), events.get("breakdown")
    if collapse is None and breakdown is not None:
        return tag(
            "p",
            tag("strong", f"The training broke down in epoch {breakdown['epoch'] + 1}: "),
            f"clean accuracy fell to {100 * breakdown['clean']:.1f}%, hardly more than naming one class for all images "
            "gives.",
            class_="alarm",
        )
    if collapse is None:
        return tag("p", "The monitor saw no collapse.")
    return tag(
        "p",
        tag("strong", f"Catastrophic overfitting in epoch {collapse['epoch'] + 1}: "),
        f"PGD-10 accuracy was {100 * collapse['pgd10']:.1f}% while FGSM accuracy was {100 * collapse['fgsm']:.1f}%. "
        "The model withstood the attack that it was trained with and no other.",
        f" What came of it: {subject.summary.collapse}." if subject.summary.collapsed_in is None else None,
        class_="alarm",
    )
