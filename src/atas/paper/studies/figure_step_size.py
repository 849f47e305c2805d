"""FGSM-RS and ATTA by step size: strength of the attack, robust accuracy, and collapse."""

from __future__ import annotations

from typing import Any

from atas.paper import plots
from atas.paper.figure_study import FigureStudy, Line, LineRecords, Table, axis_unit, entries, mean, seed_list
from atas.paper.grid import QUICK_EPS, cifar, digits
from atas.paper.measurements import Curves, StepGap
from atas.paper.study import StudyOptions, select
from atas.sweeps.seed_stats import format_collapses, summarize_seeds
from atas.sweeps.store import Store
from atas.sweeps.trial import format_eps

_EPS = 8 / 255
_STEPS = {"fgsm-rs": (2, 4, 6, 8, 10, 12, 14, 16), "atta": (2, 4, 6, 8, 10, 12)}
_OWN = {"fgsm-rs": 10 / 255, "atta": 4 / 255}  # training steps of the models that single steps attack
_QUICK_STEPS = (0.5 * QUICK_EPS, QUICK_EPS, 2 * QUICK_EPS)
_QUICK_OWN = {"fgsm-rs": QUICK_EPS, "atta": 0.5 * QUICK_EPS}
_IMAGES, _QUICK_IMAGES = 10_000, 300  # on 10,000 images the error of the gap is about 0.01
_ATTACK = "pgd10"
_STARTS = {"noise": "-", "memory": "--"}


class StepSize(FigureStudy):
    """A training for each method and step; the model of the usual step is attacked with all steps."""

    accepted_options = ("methods", "seeds", "examples", "values", "reuse")

    def lines(self, options: StudyOptions) -> list[Line]:
        """Return the steps of both methods."""
        grid, eps = (digits(), QUICK_EPS) if options.quick else (cifar("cifar10", (_EPS,)), _EPS)
        lines = []
        for method in select("method", options.methods, (*_STEPS,)):
            steps = _QUICK_STEPS if options.quick else tuple(k / 255 for k in _STEPS[method])
            own = (_QUICK_OWN if options.quick else _OWN)[method]
            gap = StepGap(steps, _QUICK_IMAGES if options.quick else _IMAGES)
            for step in steps:
                usual = (
                    method == "fgsm-rs" and not options.quick and format_eps(step) == format_eps(own)
                )  # 1.25 eps: not stated
                values = {} if usual else {"method.step_size": step}
                measurements = (Curves(), gap) if step == own else (Curves(),)
                trial = self.trial(options, grid, (grid.networks[0], method, eps), measurements, (_ATTACK,), values)
                lines.append(Line(method, format_eps(step), trial))
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
        factor, called = axis_unit(QUICK_EPS if options.quick else _EPS)
        for column, name in enumerate(names):
            colour, _, marker = plots.METHOD_STYLES[name]
            above, below = grid[0, column], grid[1, column]
            lines = [(line, records) for line, records in results if line.panel == name]
            own = {line.name: line.trial.resolved_recipe.method.settings for line, _ in lines}
            steps = {step: factor * settings.get("step_size", _OWN[name]) for step, settings in own.items()}
            gaps = _gaps(results, name)
            for start, style in _STARTS.items():
                values = gaps.get(start, {})
                x = [steps[step] for step in values]
                label = f"{name}, from {start}"
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


def _gaps(results: LineRecords, method: str) -> dict[str, dict[str, float]]:
    """Return the mean gap over seeds, by start and step."""
    measured = [entry for pair in results if pair[0].panel == method for entry in entries(*pair, StepGap)]
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
    "each step; bars are 95% intervals, or the range over seeds.",
)
