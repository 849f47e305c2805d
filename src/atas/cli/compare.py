"""`atas compare`."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from atas._utils.console import print_json, print_line, print_table
from atas._utils.files import check_output_path


def compare(
    runs: list[Path] = typer.Argument(help="Run folders."),
    plot: Path | None = typer.Option(None, "--plot", help="Plot the training curves to this PNG, SVG or PDF file."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
) -> None:
    """Compare runs: accuracy, training time, collapse. --plot also draws their training curves.

    \b
    Example: atas compare runs/atas runs/atta --plot curves.png
    """
    if plot is not None:
        check_output_path(plot, "--plot")
    from atas import report

    summaries = report.summarise(runs)
    if plot is not None:
        report.plot_curves(summaries, plot)
    if as_json:
        print_json(json.dumps([run.to_json() for run in summaries], indent=2))
        return
    print_table(report.table(summaries))
    if plot is not None:
        print_line(f"curves: {plot}")
