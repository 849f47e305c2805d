"""The training by epoch: accuracy, loss and learning rate, then step sizes and gradient norms.

Events such as a collapse or a rollback are marked in the charts. Step sizes and norms are shown as quantiles over the
examples and by decile of the gradient norm.
"""

from __future__ import annotations

from typing import Any

from atas.attacks.registry import display_name
from atas.evaluation import wilson
from atas.recipes.schema import TrainingConfig
from atas.report.charts import EPOCH_SYNC, Band, Chart, ChartLine, Mark
from atas.report.elements import Section, Unavailable
from atas.report.run_view import RunView
from atas.training.examples import TrainingExamples

_CURVES = {"clean": "c0", "fgsm": "c1", "pgd10": "c2"}
_DECILE_NAMES = ("1st", "2nd", "3rd", *(f"{number}th" for number in range(4, 11)))


def training_section(view: RunView) -> Section:
    """Return charts of accuracy, loss and learning rate over the epochs."""
    rows = view.summary.epochs
    epochs = [row["epoch"] + 1 for row in rows]
    marks = event_marks(view)
    lines = [
        ChartLine(display_name(key), column(rows, key, 100), colour, dashed=key == "clean")
        for key, colour in _CURVES.items()
    ]
    lines.append(ChartLine("training examples", column(rows, "train_accuracy", 100), "c3", dashed=True, shown=False))
    accuracy = Chart(
        "Accuracy of the monitor's images",
        "epoch",
        "accuracy, %",
        epochs,
        lines,
        marks=marks,
        limits=(0, 100),
        sync=EPOCH_SYNC,
        note=f"{_probe_set(view.recipe.training)}. In a collapse, FGSM accuracy rises and PGD-10 accuracy falls to "
        "zero.",
    )
    loss = Chart(
        "Training loss",
        "epoch",
        "loss",
        epochs,
        [ChartLine("loss", column(rows, "loss"), "c4")],
        marks=marks,
        limits=(0, None),
        digits=3,
        sync=EPOCH_SYNC,
        note="Mean over the epoch, on the perturbed training examples.",
    )
    rate = Chart(
        "Learning rate",
        "epoch",
        "rate",
        epochs,
        [ChartLine("rate", column(rows, "rate"), "c5")],
        limits=(0, None),
        digits=4,
        sync=EPOCH_SYNC,
        note="After the last update of the epoch.",
    )
    events = {event["event"]: event for event in reversed(view.summary.events)}
    context = {
        "collapse": events.get("collapse"),
        "outcome": view.summary.collapse_status if view.summary.collapse_epoch is None else None,
        "breakdown": events.get("breakdown"),
        "accuracy": accuracy,
        "loss": loss,
        "rate": rate,
    }
    return Section("training", "The training", "training", context)


def _probe_set(training: TrainingConfig) -> str:
    """Describe what the monitor measures, and when."""
    images = "Training images" if training.probe == "auto" else f"Up to {training.probe:,} training images"
    return f"{images}, attacked after every {f'{training.probe_every} epochs' if training.probe_every else 'epoch'}"


def column(rows: list[dict[str, Any]], key: str, scale: float = 1) -> list[float | None]:
    """Return one metric of every epoch; None where it was not measured."""
    return [scale * row[key] if isinstance(row.get(key), int | float) else None for row in rows]


def event_marks(view: RunView) -> list[Mark]:
    """Return marks of collapses, breakdowns, rollbacks and stops."""
    marks = []
    for event in view.summary.events:
        if event["event"] == "rollback":
            marks.append(Mark(event["to_epoch"] + 0.5, "rolled back"))
        elif event["event"] == "stop":
            marks.append(Mark(event["to_epoch"], "stopped"))
        elif event["event"] == "breakdown":
            marks.append(Mark(event["epoch"] + 1, "broke down"))
    if view.summary.collapse_epoch:
        marks.append(Mark(view.summary.collapse_epoch, "collapse"))
    return marks


def steps_section(view: RunView) -> Section:
    """Return step sizes and gradient norms: as logged by epoch, and the accuracy by norm at the end."""
    quantiles = [
        _quantiles_chart(view, "step_sizes", "Step sizes", "step size", 4),
        _quantiles_chart(view, "gradient_norms", "Gradient norms of the training examples", "gradient norm", 3),
    ]
    deciles = [
        _deciles_chart(view, "step_size_by_tenth", "Step size by tenth of the gradient norm", "mean step size", 4),
        _deciles_chart(view, "gradient_norm_by_tenth", "Gradient norm by tenth", "mean gradient norm", 3),
    ]
    has_step_sizes = any(quantiles)
    if not has_step_sizes:
        title = "Gradient norms of the monitor's images"
        quantiles = [_quantiles_chart(view, "probe_gradient_norms", title, "gradient norm", 3)]
    context = {
        "method": view.recipe.method.name,
        "has_step_sizes": has_step_sizes,
        "quantiles": [chart for chart in quantiles if chart],
        "deciles": [chart for chart in deciles if chart],
        "accuracy": _accuracy_by_decile(view) if has_step_sizes else None,
    }
    return Section("steps", "Step sizes and gradient norms", "steps", context)


def _quantiles_chart(view: RunView, key: str, title: str, what: str, digits: int) -> Chart | None:
    """Chart the quantiles of a metric by epoch; None if it was not logged."""
    rows = [row for row in view.summary.epochs if row.get(key)]
    if not rows:
        return None
    low, lower, middle, upper, high = zip(*(row[key] for row in rows), strict=True)
    return Chart(
        title,
        "epoch",
        what,
        [row["epoch"] + 1 for row in rows],
        [ChartLine("median", middle, "c2")],
        ranges=[Band("nine tenths", low, high, "c2"), Band("half", lower, upper, "c2")],
        marks=event_marks(view),
        limits=(0, None),
        digits=digits,
        sync=EPOCH_SYNC,
        note="The bands contain 50% and 90% of the examples.",
    )


def _deciles_chart(view: RunView, key: str, title: str, what: str, digits: int) -> Chart | None:
    """Chart a metric of each decile of the examples by epoch; None if it was not logged."""
    rows: list[dict[str, Any]] = [row for row in view.summary.epochs if row.get(key)]
    if not rows:
        return None
    columns = list(zip(*(row[key] for row in rows), strict=True))
    return Chart(
        title,
        "epoch",
        what,
        [row["epoch"] + 1 for row in rows],
        [ChartLine(_DECILE_NAMES[row], values, f"r{row}") for row, values in enumerate(columns)],
        marks=event_marks(view),
        limits=(0, None),
        digits=digits,
        sync=EPOCH_SYNC,
        note="The 1st tenth of the examples has the smallest gradient norms, the 10th the largest.",
    )


def _accuracy_by_decile(view: RunView) -> Chart | Unavailable:
    examples = view.training_examples
    if examples is None:
        return Unavailable("Accuracy by gradient norm: the run was trained with a version that did not store it")
    return _deciles_of(examples)


def _deciles_of(examples: TrainingExamples) -> Chart:
    """Chart the accuracy by decile that was measured at the end of the training."""
    counts = examples.deciles.tolist()
    low, high = zip(*(wilson(robust, count) for count, _, robust in counts), strict=True)
    return Chart(
        "Accuracy of training examples by tenth of the gradient norm",
        "tenth",
        "accuracy, %",
        list(range(1, len(counts) + 1)),
        [
            ChartLine("clean", [100 * clean / count for count, clean, _ in counts], "c0", dashed=True),
            ChartLine("PGD-10", [100 * robust / count for count, _, robust in counts], "c2"),
        ],
        ranges=[Band("95% interval", [100 * value for value in low], [100 * value for value in high], "c2")],
        limits=(0, 100),
        note=f"The trained model on {sum(count for count, _, _ in counts):,} training images; norms as the method "
        "averaged them during training.",
        kind="points",
    )
