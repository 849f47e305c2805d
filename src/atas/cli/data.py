"""`atas data`: get data sets and check them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Get data sets and check them.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="digits, cifar10, cifar100 or imagefolder.", show_default=False)]
Download = Annotated[str, typer.Argument(help="cifar10 or cifar100.", show_default=False)]
Root = Annotated[
    Path | None,
    typer.Option(help="Folder that holds the data.", show_default="$ATAS_DATA, else ./data"),
]
Size = Annotated[int | None, typer.Option(help="Side of the images in pixels (imagefolder alone).", show_default="224")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of sentences.")]


@app.command()
def get(name: Download, root: Root = None, as_json: AsJson = False) -> None:
    """Download cifar10 or cifar100, check it, and put it in place.

    \b
    Example: atas data get cifar10 --root data
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from atas import data

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks = {}

        def show(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=None)
            bars.update(tasks[what], completed=done, total=total)

        folder = data.fetch(name, root, progress=show)
    if as_json:
        typer.echo(json.dumps({"data": name, "folder": str(folder), "fetched": bool(tasks)}, indent=2))
        return
    typer.echo(f"{name} is in {folder}" if tasks else f"{name} is already in {folder} and intact; nothing to do")


@app.command()
def check(name: Name, root: Root = None, size: Size = None, as_json: AsJson = False) -> None:
    """Read a data set and tell what it holds; CIFAR must have the official content.

    \b
    Example: atas data check cifar10 --root data
    """
    from atas import data

    dataset = data.load(name, root, size=size)
    official, splits = data.official_hashes(name), {"train": dataset.train, "test": dataset.test}
    hashes = {half: split.sha256() for half, split in splits.items()}
    if as_json:
        found = {
            half: {"images": len(split), "sha256": hashes[half], "official": hashes[half] in official}
            for half, split in splits.items()
        }
        about = {"data": name, "shape": list(dataset.shape), "classes": list(dataset.train.classes)}
        typer.echo(json.dumps(about | found, indent=2))
        return
    channels, height, width = dataset.shape
    typer.echo(f"{name}: {channels} x {height} x {width} pixels, {dataset.num_classes} classes")
    typer.echo(f"classes: {', '.join(dataset.train.classes)}")
    for half, split in splits.items():
        state = "the official content" if hashes[half] in official else "no official hash to compare with"
        typer.echo(f"{half}: {len(split)} images, SHA-256 {hashes[half]} ({state})")
