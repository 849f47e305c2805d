"""`atas report`."""

from __future__ import annotations

from pathlib import Path

import typer

from atas._utils.console import import_torch, print_line
from atas._utils.files import check_output_path


def report(
    runs: list[Path] = typer.Argument(help="Folders of runs: one, or several to compare."),
    out: Path | None = typer.Option(
        None, "--out", help="The page's file; RUN/report.html for one run, report.html for several."
    ),
    data: str | None = typer.Option(None, "--data", help="The data's folder, where it is not that of the training."),
) -> None:
    """Write one HTML page: how runs went, how robust they are.

    The page holds everything it shows: it opens from disk, without a network. Attacks on a few images, the loss around
    them and the confusion matrix are computed when it is written, where the model and the data are at hand.

    \b
    Example: atas report runs/cifar10-preact-resnet18-atas
             atas report runs/atas runs/atta runs/fgsm-rs --out compared.html
    """
    if out is not None:
        check_output_path(out, "--out", ".html", ".htm")

    import_torch()
    from atas.paper import published
    from atas.report import write_page

    if out is None:
        out = runs[0] / "report.html" if len(runs) == 1 else Path("report.html")
    write_page(runs, out, root=data, paper=published.lookup)
    print_line(f"report: {out}")
