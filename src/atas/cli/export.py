"""`atas export`."""

from __future__ import annotations

import enum
import json
from pathlib import Path

import typer

from atas._utils.console import import_torch, print_json, print_line
from atas.cli import options


class Format(enum.StrEnum):
    """Export formats."""

    SAFETENSORS = "safetensors"
    ONNX = "onnx"
    TORCH_EXPORT = "torch-export"
    ROBUSTBENCH = "robustbench"
    HUB = "hub"


def export(
    run: Path = typer.Argument(help="Folder of a finished run."),
    to: Format = typer.Option(..., "--to", help="Output format."),
    out: Path | None = typer.Option(None, "--out", help="Output folder; default: RUN/export/FORMAT."),
    trust: bool = options.TRUST,
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of text."),
) -> None:
    """Export the model of a run, with a model card.

    The card describes the model and its evaluation. The exported model is compared with the original on test images.
    `atas.load` reads safetensors exports.

    \b
    Example: atas export runs/cifar10-preact-resnet18-atas --to onnx --out model
    """
    import_torch()
    from atas.export import write

    exported = write(run, to.value, out, trust=trust)
    if as_json:
        print_json(json.dumps(exported.to_json(), indent=2))
        return
    if exported.check is not None:
        print_line(exported.check)
    for note in exported.notes:
        print_line(note)
    for path in exported.files:
        print_line(f"written: {path}")
