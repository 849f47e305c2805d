"""`atas report`."""

from __future__ import annotations

from pathlib import Path

import typer

from atas._utils.console import import_torch, print_line
from atas._utils.files import check_output_path


def report(
    runs: list[Path] = typer.Argument(help="Run folders, or folders of several runs; several are compared."),
    out: Path | None = typer.Option(
        None, "--out", help="Output file (.html); default: report.html in the folder, or here for several folders."
    ),
) -> None:
    """Write an HTML report of one run, or a comparison of several.

    The page is one self-contained file. It shows what `atas train` and `atas evaluate` wrote to the run folder; the
    model and the data are not needed.

    \b
    Example: atas report runs/cifar10-preact-resnet18-atas
             atas report runs/atas runs/atta runs/fgsm-rs --out compared.html
             atas report runs/atas-seeds
    """
    if out is not None:
        check_output_path(out, "--out", ".html", ".htm")

    import_torch()
    from atas.paper import published
    from atas.report import write_page

    if out is None:
        out = runs[0] / "report.html" if len(runs) == 1 else Path("report.html")
    write_page(runs, out, paper=published.lookup)
    print_line(f"report: {out}")
