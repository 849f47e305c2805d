"""FGSM-RS and ATTA by step size: strength of the attack, robust accuracy, and collapse."""

from __future__ import annotations

import itertools
from typing import Any

from atas.paper import plots, published
from atas.paper.figure_study import FigureStudy, Line, LineRecords, Table, axis_unit, entries, mean, seed_list
from atas.paper.grid import QUICK_EPS, cifar, digits
from atas.paper.measurements import Curves, StepGap
from atas.paper.study import StudyOptions, select, select_budgets
from atas.sweeps.markdown import format_collapses
from atas.sweeps.record import summarize_seeds
from atas.sweeps.store import Store
from atas.sweeps.trial import format_eps

_QUARTERS = {"fgsm-rs": range(1, 9), "atta": range(1, 7)}  # steps in units of eps / 4
_QUICK_STEPS = (0.5 * QUICK_EPS, QUICK_EPS, 2 * QUICK_EPS)
_QUICK_OWN = {"fgsm-rs": QUICK_EPS, "atta": 0.5 * QUICK_EPS}
_IMAGES, _QUICK_IMAGES = 10_000, 300  # on 10,000 images the error of the gap is about 0.01
_ATTACK = "pgd10"
_STARTS = {"noise": "-", "memory": "--"}


class StepSize(FigureStudy):
    """A training for each network, budget, method and step; the model of the usual step is attacked with all steps."""

    accepted_options = ("methods", "networks", "eps", "seeds", "examples", "values", "reuse")

    def lines(self, options: StudyOptions) -> list[Line]:
        """Return the steps of both methods, by default on the smaller network at the smallest budget."""
        budgets = (QUICK_EPS,) if options.quick else tuple(published.budgets("cifar10"))
        grid = digits() if options.quick else cifar("cifar10", budgets)
        networks = select("network", options.networks or grid.networks[:1], grid.networks)
        selected = select_budgets(options.eps or budgets[:1], budgets)
        methods = select("method", options.methods, (*_QUARTERS,))
        several = len(networks) * len(selected) > 1
        lines = []
        for net, eps, method in itertools.product(networks, selected, methods):
            panel = f"{method}, {net}, eps {format_eps(eps)}" if several else method
            steps, own = _steps(method, eps, options.quick)
            gap = StepGap(steps, _QUICK_IMAGES if options.quick else _IMAGES)
            for step in steps:
                usual = (
                    method == "fgsm-rs" and not options.quick and format_eps(step) == format_eps(own)
                )  # 1.25 eps: not stated
                values = {} if usual else {"method.step_size": step}
                measurements = (Curves(), gap) if step == own else (Curves(),)
                trial = self.trial(options, grid, (net, method, eps), measurements, (_ATTACK,), values)
                lines.append(Line(panel, format_eps(step), trial))
        return lines

    def table(self, options: StudyOptions, store: Store) -> Table:
        """Return gap, accuracy and collapse for each step."""
        lines, rows, results = [], [], self.line_records(options, store)
        gaps = {line.panel: _gaps(results, line.panel) for line, _ in results}
        for line, records in results:
            gap = {start: values[line.name] for start, values in gaps[line.panel].items()}
            accuracy = summarize_seeds(records, _ATTACK)
            shown = [f"{gap[start]:.3f}" if start in gap else "-" for start in _STARTS]
            lines.append(
                [line.panel, line.name, *shown, str(accuracy or "-"), format_collapses(records), seed_list(records)]
            )
            rows.append(
                {
                    "method": line.panel,
                    "network": line.trial.resolved_recipe.model.name,
                    "eps": format_eps(line.trial.resolved_recipe.method.eps),
                    "step": line.name,
                    "loss_gap": gap,
                    _ATTACK: None if accuracy is None else accuracy.to_json(),
                    "collapsed_in_epoch": [record.collapsed_in for record in records],
                }
            )
        counts = {entry["n"] for pair in results for entry in entries(*pair, StepGap)}
        note = f"Gaps are means over {', '.join(f'{n:,}' for n in sorted(counts)) or 'no'} training images."
        header = ["method", "step", *(f"gap from {start}" for start in _STARTS), "PGD-10, test, %", "collapse", "seeds"]
        return Table(header, lines, rows, notes=(note,))

    def picture(self, options: StudyOptions, store: Store) -> Any:
        """Draw the gap above the accuracy, with a column for each method."""
        results = self.line_records(options, store)
        names = list(dict.fromkeys(line.panel for line, _ in results))
        figure_, grid = plots.panels(2, len(names), height=3.0, sharex="col", sharey="row")
        for column, name in enumerate(names):
            above, below = grid[0, column], grid[1, column]
            lines = [(line, records) for line, records in results if line.panel == name]
            config = lines[0][0].trial.resolved_recipe.method
            colour, _, marker = plots.METHOD_STYLES[config.name]
            factor, called = axis_unit(config.eps)
            _, usual = _steps(config.name, config.eps, options.quick)
            own = {line.name: line.trial.resolved_recipe.method.settings for line, _ in lines}
            steps = {step: factor * settings.get("step_size", usual) for step, settings in own.items()}
            gaps = _gaps(results, name)
            for start, style in _STARTS.items():
                values = gaps.get(start, {})
                x = [steps[step] for step in values]
                label = f"{config.name}, from {start}"
                above.plot(x, list(values.values()), style, marker=marker, color=colour, label=label if x else None)
            plots.placeholder(above, [*gaps])
            _accuracies(below, lines, steps, colour, marker)
            above.set_title(name, fontsize=11)
            below.set_xlabel(f"step size, {called}")
        grid[0, 0].set_ylabel("loss gap: PGD-10 less\none step, training images")
        grid[1, 0].set_ylim(bottom=-2)
        grid[1, 0].set_ylabel("PGD-10 accuracy of models\ntrained so, test images, %")
        plots.legend(figure_, grid)
        return figure_


def _steps(method: str, eps: float, quick: bool) -> tuple[tuple[float, ...], float]:
    """Return the steps in ascending order, and the training step of the model that single steps attack.

    >>> steps, own = _steps("atta", 12 / 255, quick=False)
    >>> [round(255 * step) for step in steps], round(255 * own)
    ([3, 4, 6, 9, 12, 15, 18], 4)
    """
    if quick:
        return _QUICK_STEPS, _QUICK_OWN[method]
    pixels = round(255 * eps)
    own = 1.25 * pixels if method == "fgsm-rs" else 4.0
    steps = {pixels * quarters / 4 for quarters in _QUARTERS[method]} | {own}
    return tuple(step / 255 for step in sorted(steps)), own / 255


def _gaps(results: LineRecords, panel: str) -> dict[str, dict[str, float]]:
    """Return the mean gap over seeds, by start and step."""
    measured = [entry for pair in results if pair[0].panel == panel for entry in entries(*pair, StepGap)]
    steps = measured[0]["steps"] if measured else []
    return {
        start: {
            format_eps(step): mean([entry["gap"][start][number] for entry in measured])
            for number, step in enumerate(steps)
        }
        for start in (measured[0]["gap"] if measured else ())
    }


def _accuracies(axes: Any, lines: LineRecords, steps: dict[str, float], colour: str, marker: str) -> None:
    points = [(steps[line.name], summarize_seeds(records, _ATTACK), records) for line, records in lines if records]
    plots.placeholder(axes, points)
    known = [(x, stats, records) for x, stats, records in points if stats is not None]
    axes.plot([x for x, _, _ in known], [stats.value for _, stats, _ in known], "-", marker=marker, color=colour)
    axes.vlines([x for x, _, _ in known], [f.low for _, f, _ in known], [f.high for _, f, _ in known], color=colour)
    collapsed = [(x, stats.value) for x, stats, records in known if any(r.collapsed_in for r in records)]
    if collapsed:
        x, y = [step for step, _ in collapsed], [value for _, value in collapsed]
        axes.plot(x, y, " ", marker="x", markersize=10, color=plots.BLACK, label="collapsed in training")


STUDY = StepSize(
    "figure-step-size",
    "loss gap to PGD-10, robust accuracy and collapse against the step size, FGSM-RS and ATTA",
    "FGSM-RS and ATTA with other step sizes",
    "the larger the step, the smaller the gap between the losses of PGD-10 and of the single step on a trained model; "
    "robust accuracy grows with the step until training collapses. No figures are printed.",
    "the gap on training images, the first 10,000 in the full form, for the model trained with the usual step (there "
    "10/255 for FGSM-RS, 4/255 for ATTA). Steps are from noise, as FGSM-RS and, after a reset, ATTA take them, and for "
    "ATTA also from the perturbations that it remembers at the end of its training. Those were made with the usual "
    "step, so a larger one may leave a point that is better. Accuracy is on the test images, of a model trained with "
    "each step; bars are 95% intervals, or the range over seeds. Steps are multiples of eps/4, and the usual ones; "
    "other networks and budgets can be asked for (--networks, --eps).",
)
