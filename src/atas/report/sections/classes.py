"""Accuracy of each class, and the confusion between classes under attack."""

from __future__ import annotations

from atas.attacks.registry import display_name
from atas.evaluation import wilson
from atas.report.formatting import attack_names, format_interval, percent, whisker
from atas.report.html import Cell, Content, Markup, Section, html_table, or_unavailable, tag
from atas.report.measurements import ConfusionMatrix, confusion_matrix
from atas.report.run_view import RunView

_MATRIX_UP_TO = 20  # classes, up to which a matrix can be read
_MISTAKES = 15


def classes_section(view: RunView) -> Section:
    """By class, then the matrix."""
    return Section(
        "classes",
        "Classes",
        [
            or_unavailable(lambda: _by_class(view)),
            tag("h3", "Confusion under attack"),
            or_unavailable(lambda: _confusion(confusion_matrix(view))),
        ],
    )


def _by_class(view: RunView) -> Markup:
    evaluation, test = view.test_split
    names = ["clean", *attack_names(evaluation)]
    shown = names if len(names) < 2 else [*names, "worst"]
    rows: list[list[Cell | Content]] = []
    for number, label in enumerate(test.classes):
        members = test.labels == number
        n = int(members.sum())
        if not n:
            continue
        row: list[Cell | Content] = [Cell(label, sort=number), Cell(str(n), sort=n)]
        for name in shown:
            correct = int(evaluation.correct[name][members].sum())
            row.append(Cell(percent(correct / n), sort=correct / n))
        interval = wilson(correct, n)
        rows.append(
            [
                *row,
                Cell(format_interval(interval), sort=interval[0]),
                Cell(whisker(correct / n, interval), sort=correct / n),
            ]
        )
    head = ["class", "images", *map(display_name, shown), "95% interval", ""]
    caption = (
        f"Accuracy of each class in percent, on {evaluation.n:,} test images; worst case is right under every attack, "
        "and what the interval is of"
    )
    return html_table(head, rows, caption=caption, sortable=True)


def _confusion(matrix: ConfusionMatrix) -> list[Content]:
    mistakes = ", ".join(f"{a} for {b} ({count} of {of})" for a, b, count, of in matrix.top_mistakes(3))
    lead = f"Under PGD-10, on {matrix.num_images:,} test images, measured when this page was made."
    said = f"{lead} Most often mistaken: {mistakes}." if mistakes else f"{lead} No mistakes."
    return [tag("p", said), _matrix(matrix) if len(matrix.classes) <= _MATRIX_UP_TO else _mistakes(matrix)]


def _mistakes(matrix: ConfusionMatrix) -> Markup:
    """Of many classes, only what happens most often."""
    rows: list[list[Cell | Content]] = [
        [a, b, str(count), str(of)] for a, b, count, of in matrix.top_mistakes(_MISTAKES)
    ]
    head = ["true class", "taken for", "times", "of"]
    return html_table(head, rows, caption="The most frequent mistakes under PGD-10", texts=2)


def _matrix(matrix: ConfusionMatrix) -> Markup:
    rows: list[list[Cell | Content]] = []
    for number, label in enumerate(matrix.classes):
        counts = matrix.counts[number].tolist()
        total = sum(counts) or 1
        cells = [
            Cell(
                str(count) if count else "",
                style=f"--share:{100 * count / total:.0f}%",
                title=f"{label} taken for {matrix.classes[other]}: {count} of {total}",
                class_="right" if other == number else "heat",
            )
            for other, count in enumerate(counts)
        ]
        rows.append([label, *cells])
    caption = "Rows are true classes, columns what the model says under PGD-10"
    return html_table(["", *matrix.classes], rows, caption=caption, class_="matrix")
