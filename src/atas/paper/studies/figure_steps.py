"""Gradient norm and step size of easy, medium and hard examples during the training of ATAS."""

from __future__ import annotations

from typing import Any

from atas.paper import plots
from atas.paper.figure_study import FigureStudy, Line, Table, axis_unit, format_step, mean, seed_list
from atas.paper.grid import QUICK_EPS, cifar, digits
from atas.paper.measurements import Norms
from atas.paper.study import StudyOptions, select
from atas.sweeps.store import Store

DECILES_SHOWN = (1, 5, 10)
_COLOURS = {1: plots.BLUE, 5: plots.GREEN, 10: plots.RED}
_KINDS = {"norm_by_tenth": "gradient norm", "step_by_tenth": "step size"}


class Steps(FigureStudy):
    """The runs of ATAS in the table at the smallest budget; it trains nothing else."""

    accepted_options = ("networks", "seeds", "examples", "values", "reuse")
    required_measurements = (Norms.name,)

    def lines(self, options: StudyOptions) -> list[Line]:
        """Return a line for each network; the deciles are in its record."""
        grid = digits() if options.quick else cifar("cifar10", (8 / 255,))
        eps = QUICK_EPS if options.quick else 8 / 255
        networks = select("network", options.networks, grid.networks)
        return [Line(net, net, self.trial(options, grid, (net, "atas", eps), (Norms(),))) for net in networks]

    def table(self, options: StudyOptions, store: Store) -> Table:
        """Return the mean over the epochs after the warm-up, and the range."""
        lines, rows, notes = [], [], []
        for line, records in self.line_records(options, store):
            eps = line.trial.resolved_recipe.method.eps
            for tenth in DECILES_SHOWN:
                cells, row = [], {"network": line.name, "tenth": tenth}
                for kind, name in _KINDS.items():
                    values = [step[tenth - 1] for record in records for step in record.observed["norms"][kind]]
                    row[name.replace(" ", "_")] = values
                    cells.append(_spread(values, kind, eps) if values else "-")
                lines.append([line.name, f"D_{tenth}^{tenth}", *cells, seed_list(records)])
                rows.append(row)
            if records:
                step = mean([record.observed["norms"]["average"]["step_size"] for record in records])
                notes.append(f"Mean step after the warm-up, {line.name}: {format_step(step, eps)}.")
        header = ["network", "subset", "gradient norm: mean (epochs)", "step size: mean (epochs)", "seeds"]
        return Table(header, lines, rows, notes=notes)

    def picture(self, options: StudyOptions, store: Store) -> Any:
        """Draw norms above steps, with a column for each network."""
        results = self.line_records(options, store)
        figure, grid = plots.panels(2, len(results), width=5.0, height=3.0, sharex="col")
        for column, (line, records) in enumerate(results):
            settings = line.trial.resolved_recipe
            factor, called = axis_unit(settings.method.eps)
            for row, (kind, name) in enumerate(_KINDS.items()):
                axes = grid[row, column]
                plots.placeholder(axes, records)
                for number, record in enumerate(records):
                    seen = record.observed["norms"]
                    for tenth in DECILES_SHOWN:
                        scale = factor if kind == "step_by_tenth" else 1.0
                        values = [scale * step[tenth - 1] for step in seen[kind]]
                        axes.plot(seen["epochs"], values, color=_COLOURS[tenth], linewidth=1.8 if not number else 0.8)
                        if not number:
                            plots.end_label(axes, seen["epochs"][-1], values[-1], f"D{tenth}", _COLOURS[tenth])
                every, epochs = settings.method.settings.get("reset_every", 10), settings.training.epochs
                resets = range(every, epochs, every)
                for reset in resets:
                    axes.axvline(reset, color=plots.GREY, linewidth=0.8, linestyle=":")
                axes.set_ylabel(f"{name}, {called}" if kind == "step_by_tenth" else name)
                axes.set_ylim(bottom=0)
                axes.margins(x=0.08)
            grid[0, column].set_title(line.name, fontsize=11)
            plots.epoch_axis(grid[1, column], "epoch (dotted: perturbations are reset)" if resets else "epoch")
        return figure


def _spread(values: list[float], kind: str, eps: float) -> str:
    if kind == "step_by_tenth":
        return f"{format_step(mean(values), eps)} ({format_step(min(values), eps)} to {format_step(max(values), eps)})"
    return f"{mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


STUDY = Steps(
    "figure-steps",
    "gradient norm and step size of the 1st, 5th and 10th subset through the training of ATAS",
    "Gradient norm and step size through the training of ATAS",
    "both are stable for each subset, so a norm is rather a property of the example; jumps are where perturbations are "
    "reset. It prints no figures here; below another one it has a mean step of ATAS, 9.3/255, of a data set, network "
    "and budget that it does not name.",
    "the training images in ten subsets by their gradient norm averaged over the epochs; of each subset the mean norm "
    "(root of v) and the mean step after every epoch. The first epochs are warm-up, with a constant step, and are left "
    "out.",
)
