"""Step sizes and gradient norms: how they spread over the examples by epoch, and by tenth of the gradient norm."""

from __future__ import annotations

from typing import Any

from atas.report._chart import Chart, Line, Range
from atas.report._html import Content, tag
from atas.report._section import Section, or_say_why
from atas.report._subject import Subject
from atas.report._tenths import Tenths, tenths_of
from atas.report.sections.training import marks_of

_TENTHS = ("1st", "2nd", "3rd", *(f"{number}th" for number in range(4, 11)))
_SYNC = "epochs"


def section(subject: Subject) -> Section:
    """What is in the metrics, and the state at the end as the model shows it."""
    parts: list[Content] = [
        tag(
            "p",
            "Examples with large gradient norms are the ones that a single step overshoots: fitting them, the authors "
            "of ATAS find, is what makes training collapse. ATAS therefore gives them smaller steps.",
        )
    ]
    spread = [
        _fan(subject, "step_sizes", "Step sizes", "step size", 4),
        _fan(subject, "gradient_norms", "Gradient norms of the training examples", "gradient norm", 3),
    ]
    by_tenth = [
        _tenths(subject, "step_size_by_tenth", "Step size by tenth of the gradient norm", "mean step size", 4),
        _tenths(subject, "gradient_norm_by_tenth", "Gradient norm by tenth", "mean gradient norm", 3),
    ]
    if not any(spread):
        method = subject.recipe.method.name
        parts.append(tag("p", f"{method} keeps no step size for each example, so there are none to show."))
        spread = [_fan(subject, "probe_gradient_norms", "Gradient norms of the monitor's images", "gradient norm", 3)]
        if not any(spread):
            parts.append(tag("p", "This run was made by a version that did not log gradient norms.", class_="absent"))
    parts.append(tag("div", [chart.html() for chart in spread if chart], class_="pair"))
    parts.append(tag("div", [chart.html() for chart in by_tenth if chart], class_="pair"))
    parts.append(or_say_why(lambda: _at_the_end(tenths_of(subject))))
    return Section("steps", "Step sizes and gradient norms", parts)


def _fan(subject: Subject, key: str, title: str, what: str, digits: int) -> Chart | None:
    """The quantiles of something, by epoch."""
    rows = [row for row in subject.summary.epochs if row.get(key)]
    if not rows:
        return None
    low, lower, middle, upper, high = zip(*(row[key] for row in rows), strict=True)
    return Chart(
        title,
        "epoch",
        what,
        [row["epoch"] + 1 for row in rows],
        [Line("median", middle, "c2")],
        ranges=[Range("nine tenths", low, high, "c2"), Range("half", lower, upper, "c2")],
        marks=marks_of(subject),
        limits=(0, None),
        digits=digits,
        sync=_SYNC,
        note="The bands hold half and nine tenths of the examples.",
    )


def _tenths(subject: Subject, key: str, title: str, what: str, digits: int) -> Chart | None:
    """A line for each tenth of the examples, by epoch."""
    rows: list[dict[str, Any]] = [row for row in subject.summary.epochs if row.get(key)]
    if not rows:
        return None
    columns = list(zip(*(row[key] for row in rows), strict=True))
    return Chart(
        title,
        "epoch",
        what,
        [row["epoch"] + 1 for row in rows],
        [Line(_TENTHS[place], values, f"r{place}") for place, values in enumerate(columns)],
        marks=marks_of(subject),
        limits=(0, None),
        digits=digits,
        sync=_SYNC,
        note="The 1st tenth of the examples has the smallest norms, the 10th the largest.",
    )


def _at_the_end(found: Tenths) -> Content:
    """Accuracy by tenth, measured when the page was made."""
    low, high = zip(*found.interval, strict=True)
    return Chart(
        "Accuracy of training examples by tenth of the gradient norm",
        "tenth",
        "accuracy, %",
        list(range(1, len(found.robust) + 1)),
        [
            Line("clean", [100 * value for value in found.clean], "c0", dashed=True),
            Line("PGD-10", [100 * value for value in found.robust], "c2"),
        ],
        ranges=[Range("95% interval", [100 * value for value in low], [100 * value for value in high], "c2")],
        limits=(0, 100),
        note=f"The trained model on {found.count:,} training images; {found.by}.",
        kind="points",
    ).html()
