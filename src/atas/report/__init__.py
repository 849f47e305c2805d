"""What people look at: tables and plots of runs."""

from __future__ import annotations

from atas.report._compare import Summary, summarise, table
from atas.report._plot import plot_curves

__all__ = ["Summary", "plot_curves", "summarise", "table"]
