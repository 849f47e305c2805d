"""What people look at: tables, plots and a page of runs."""

from __future__ import annotations

from atas.report._compare import Summary, summarise, table
from atas.report._plot import plot_curves
from atas.report.page import write_page

__all__ = ["Summary", "plot_curves", "summarise", "table", "write_page"]
