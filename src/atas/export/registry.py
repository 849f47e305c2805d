"""Export formats by name, and `write`, which exports a run's model with its card."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atas._utils.files import write_text
from atas.errors import UsageError, unknown
from atas.export import hub, onnx, robustbench, safetensors, torch_export
from atas.export.base import ExportSource, FormatOutput
from atas.export.model_card import is_card, render_card
from atas.training import Run
from atas.training.run import RunFolder

_WRITERS: dict[str, Callable[[ExportSource, Path], FormatOutput]] = {
    "safetensors": safetensors.write,
    "onnx": onnx.write,
    "torch-export": torch_export.write,
    "robustbench": robustbench.write,
    "hub": hub.write,
}
_RANDOM = "the model gives other logits for the same images in every pass, so the export was not compared with it"
FORMATS = tuple(_WRITERS)


@dataclass(frozen=True)
class Exported:
    """The result of an export: folder, files, how they were checked, and notes for the user."""

    folder: Path
    files: tuple[Path, ...]
    check: str | None
    difference: float | None
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "folder": str(self.folder),
            "files": [str(path) for path in self.files],
            "check": self.check,
            "difference": self.difference,
            "notes": list(self.notes),
        }


def write(
    run: Run | str | os.PathLike[str], to: str, out: str | os.PathLike[str] | None = None, *, trust: bool = False
) -> Exported:
    """Export the model of a run.

    `to` is one of `FORMATS`. Files and a model card, `README.md`, are written to the folder `out`, by default
    `<run>/export/<to>`, and replace those of an earlier export. Raises an error if the exported model has other logits
    than the original. `trust` allows the folder to name code as its model, which is imported and run.

    >>> write("runs/mine", "onnx").check  # doctest: +SKIP
    """
    if to not in FORMATS:
        raise unknown("format", to, FORMATS)
    source = ExportSource.load(run if isinstance(run, Run) else Path(run), trust=trust)
    folder = Path(out) if out is not None else RunFolder(source.run.folder).exports / to
    page = folder / "README.md"
    _check_replaceable(folder, page)
    folder.mkdir(parents=True, exist_ok=True)
    output = _WRITERS[to](source, folder)
    if source.is_random:
        output = replace(output, notes=(*output.notes, _RANDOM))
    write_text(page, render_card(source, output))
    comparison = output.comparison
    return Exported(
        folder,
        (*output.files, page),
        None if comparison is None else str(comparison),
        None if comparison is None else comparison.difference,
        output.notes,
    )


def _check_replaceable(folder: Path, page: Path) -> None:
    """Raise UsageError if an export would replace files that are not those of an earlier export."""
    if folder.is_file():
        raise UsageError(f"{folder} is a file; choose a folder for the export")
    if RunFolder(folder).recipe.exists():
        raise UsageError(
            f"{folder} is the folder of a run, whose weights an export would replace: choose another folder"
        )
    if page.exists() and not is_card(page):
        raise UsageError(f"{folder} holds a README.md that is no model card: choose another folder for the export")
