"""Robust accuracy of each class, and what classes are taken for under attack."""

from __future__ import annotations

from atas.evaluation import wilson
from atas.evaluation._names import written
from atas.report._confusion import Confusion, confusion
from atas.report._html import Content, Markup, tag
from atas.report._section import Section, or_say_why
from atas.report._subject import Subject
from atas.report._table import Cell, table
from atas.report._words import attacks_of, between, percent, whisker

_SMALL = 20  # classes, up to which a matrix can be read
_MISTAKES = 15


def section(subject: Subject) -> Section:
    """By class, then the matrix."""
    return Section(
        "classes",
        "Classes",
        [
            or_say_why(lambda: _by_class(subject)),
            tag("h3", "Confusion under attack"),
            or_say_why(lambda: _confusion(confusion(subject))),
        ],
    )


def _by_class(subject: Subject) -> Markup:
    found, test = subject.tested
    names = ["clean", *attacks_of(found)]
    shown = names if len(names) < 2 else [*names, "worst"]
    rows: list[list[Cell | Content]] = []
    for number, label in enumerate(test.classes):
        members = test.labels == number
        n = int(members.sum())
        if not n:
            continue
        row: list[Cell | Content] = [Cell(label, sort=number), Cell(str(n), sort=n)]
        for name in shown:
            right = int(found.correct[name][members].sum())
            row.append(Cell(percent(right / n), sort=right / n))
        interval = wilson(right, n)
        rows.append(
            [*row, Cell(between(interval), sort=interval[0]), Cell(whisker(right / n, interval), sort=right / n)]
        )
    head = ["class", "images", *map(written, shown), "95% interval", ""]
    caption = (
        f"Accuracy of each class in percent, on {found.n:,} test images; worst case is right under every attack, "
        "and what the interval is of"
    )
    return table(head, rows, caption=caption, sortable=True)


def _confusion(found: Confusion) -> list[Content]:
    mistakes = ", ".join(f"{a} for {b} ({count} of {of})" for a, b, count, of in found.most(3))
    lead = f"Under PGD-10, on {found.images:,} test images, measured when this page was made."
    said = f"{lead} Most often mistaken: {mistakes}." if mistakes else f"{lead} No mistakes."
    return [tag("p", said), _matrix(found) if len(found.classes) <= _SMALL else _mistakes(found)]


def _mistakes(found: Confusion) -> Markup:
    """Of many classes, only what happens most often."""
    rows: list[list[Cell | Content]] = [[a, b, str(count), str(of)] for a, b, count, of in found.most(_MISTAKES)]
    head = ["true class", "taken for", "times", "of"]
    return table(head, rows, caption="The most frequent mistakes under PGD-10", texts=2)


def _matrix(found: Confusion) -> Markup:
    rows: list[list[Cell | Content]] = []
    for number, label in enumerate(found.classes):
        counts = found.counts[number].tolist()
        total = sum(counts) or 1
        cells = [
            Cell(
                str(count) if count else "",
                style=f"--share:{100 * count / total:.0f}%",
                title=f"{label} taken for {found.classes[other]}: {count} of {total}",
                class_="right" if other == number else "heat",
            )
            for other, count in enumerate(counts)
        ]
        rows.append([label, *cells])
    caption = "Rows are true classes, columns what the model says under PGD-10"
    return table(["", *found.classes], rows, caption=caption, class_="matrix")
