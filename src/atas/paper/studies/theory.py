"""Measured regret of ASGDBCA and SGDBCA on problems that meet the assumptions of the bounds."""

from __future__ import annotations

from atas.paper.study import StandaloneStudy, StudyOptions, StudyResult
from atas.paper.theory import render


class Theory(StandaloneStudy):
    """A study without a plan: it trains no network."""

    def run(self, options: StudyOptions) -> StudyResult:
        """Run the experiment and write its files."""
        files = render.write_results(self.file(options, ""), options.quick)
        page = next(path for path in files if path.suffix == ".md")
        return StudyResult(files, page.read_text(encoding="utf-8"))


STUDY = Theory("theory", "regret of ASGDBCA and SGDBCA against both bounds, and the gap of averaged iterates")
