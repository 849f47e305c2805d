"""The regret bounds, run: ASGDBCA and SGDBCA on a problem that meets the assumptions."""

from __future__ import annotations

from atas.paper.study import StandaloneStudy, StudyOptions, StudyResult
from atas.paper.theory import render


class Theory(StandaloneStudy):
    """It trains no network, so it has no plan."""

    def run(self, options: StudyOptions) -> StudyResult:
        """Hand over to the analysis."""
        files = render.write_results(self.file(options, ""), options.quick)
        page = next(path for path in files if path.suffix == ".md")
        return StudyResult(files, page.read_text(encoding="utf-8"))


STUDY = Theory("theory", "regret of ASGDBCA and SGDBCA against both bounds, and the gap of averaged iterates")
