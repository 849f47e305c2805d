"""The regret bounds, run: ASGDBCA and SGDBCA on a problem that meets the assumptions."""

from __future__ import annotations

from atas.analysis import theory
from atas.reproduce.study import Alone, Report, Request


class Theory(Alone):
    """It trains no network, so it has no plan."""

    def run(self, request: Request) -> Report:
        """Hand over to the analysis."""
        files = theory.run(self.file(request, ""), request.quick)
        page = next(path for path in files if path.suffix == ".md")
        return Report(files, page.read_text(encoding="utf-8"))


STUDY = Theory("theory", "regret of ASGDBCA and SGDBCA against both bounds, and the gap of averaged iterates")
