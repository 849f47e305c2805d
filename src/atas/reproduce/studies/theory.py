"""The regret bounds, run: ASGDBCA and SGDBCA on a problem that meets the assumptions."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path

from atas.errors import UsageError
from atas.reproduce.progress import PlanProgress
from atas.reproduce.study import Report, Request, Study

_MODULE = "atas.analysis.theory"


class Theory(Study):
    """It trains no network, so it has no plan."""

    def run(self, request: Request, progress: PlanProgress) -> Report:
        """Hand over to the analysis."""
        self.check(request)
        try:
            analysis = importlib.import_module(_MODULE)
        except ModuleNotFoundError as error:
            if error.name not in (_MODULE, _MODULE.rpartition(".")[0]):
                raise
            raise UsageError(f"the study {self.name} needs {_MODULE}, which this version does not have") from error
        folder = request.out / self.file(request, "").name
        folder.mkdir(parents=True, exist_ok=True)
        made = analysis.run(folder, request.quick)
        files = tuple(Path(path) for path in made) if isinstance(made, Iterable) else tuple(sorted(folder.iterdir()))
        pages = [path for path in files if path.suffix == ".md"]
        return Report(files, pages[0].read_text(encoding="utf-8") if pages else "")


STUDY = Theory("theory", "regret of ASGDBCA and SGDBCA against both bounds, and the gap of averaged iterates")
