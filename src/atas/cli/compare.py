"""`atas compare`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from atas._utils.console import print_json, print_line, print_table
from atas._utils.files import check_output_path

if TYPE_CHECKING:
    from atas.report import RunSummary, SeedGroup


def compare(
    runs: list[Path] = typer.Argument(help="Run folders, or folders of several runs."),
    each: bool = typer.Option(False, "--each", help="List every seed on its own instead of mean and range."),
    plot: Path | None = typer.Option(None, "--plot", help="Plot the training curves to this PNG, SVG or PDF file."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
) -> None:
    """Compare runs: accuracy, training time, collapse. --plot also draws their training curves.

    The runs of `atas train --seeds` are one row, with mean and range over the seeds; --each lists them one by one. A
    folder of runs stands for all runs in it.

    \b
    Example: atas compare runs/atas runs/atta --plot curves.png
             atas compare runs/demo
    """
    if plot is not None:
        check_output_path(plot, "--plot")
    from atas import report

    rows: Sequence[RunSummary | SeedGroup]
    rows = report.summarise(report.run_folders(runs)) if each else report.summarise_groups(runs)
    if plot is not None:
        report.plot_curves(report.summarise(report.run_folders(runs)), plot)
    if as_json:
        print_json(json.dumps([row.to_json() for row in rows], indent=2))
        return
    print_table(report.table(rows))
    if plot is not None:
        print_line(f"curves: {plot}")
