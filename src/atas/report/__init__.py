"""Reports of runs: a table for the terminal, a plot of training curves, and an HTML page."""

from __future__ import annotations

from atas.report.compare import plot_curves, table
from atas.report.page import write_page
from atas.report.seed_groups import SeedGroup, run_folders, summarise_groups
from atas.report.summary import RunSummary, summarise

__all__ = [
    "RunSummary",
    "SeedGroup",
    "plot_curves",
    "run_folders",
    "summarise",
    "summarise_groups",
    "table",
    "write_page",
]
