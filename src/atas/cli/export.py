"""`atas export`."""

from __future__ import annotations

import enum
import json
from pathlib import Path

import typer

from atas._utils.console import import_torch, print_line


class Format(enum.StrEnum):
    """What a model can be exported to."""

    SAFETENSORS = "safetensors"
    ONNX = "onnx"
    TORCH_EXPORT = "torch-export"
    ROBUSTBENCH = "robustbench"


def export(
    run: Path = typer.Argument(help="The folder of a finished run."),
    to: Format = typer.Option(..., "--to", help="The format."),
    out: Path | None = typer.Option(None, "--out", help="The folder to write to; RUN/export/FORMAT by default."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of sentences."),
) -> None:
    """Write the model of a run for use elsewhere, with a card.

    The card says what the model is and how it was measured. The exported model is compared with the original on test
    images. `atas.load` reads safetensors back.

    \b
    Example: atas export runs/cifar10-preact-resnet18-atas --to onnx --out model
    """
    import_torch()
    from atas.export import write

    found = write(run, to.value, out)
    if as_json:
        typer.echo(json.dumps(found.to_json(), indent=2))
        return
    if found.check is not None:
        print_line(found.check)
    for note in found.notes:
        print_line(note)
    for path in found.files:
        print_line(f"written: {path}")
