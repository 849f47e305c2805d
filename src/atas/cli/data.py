"""`atas data`: get data sets, check them, and pack images of your own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from atas._utils.formatting import format_bytes

app = typer.Typer(help="Get data sets, check them, and pack images of your own.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="digits, cifar10, cifar100, imagefolder or packed.", show_default=False)]
Download = Annotated[str, typer.Argument(help="cifar10 or cifar100.", show_default=False)]
Root = Annotated[
    Path | None,
    typer.Option(help="Folder that holds the data.", show_default="$ATAS_DATA, else ./data"),
]
Size = Annotated[int | None, typer.Option(help="Side of the images in pixels (imagefolder alone).", show_default="224")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of sentences.")]
Packed = Annotated[Path, typer.Argument(help="Folder of a packed set.", show_default=False)]
Photos = Annotated[
    Path, typer.Argument(help="Folder with train/<class>/ and test/<class>/ (or val/<class>/).", show_default=False)
]
Workers = Annotated[int | None, typer.Option(help="Processes.", show_default="one a processor")]


@app.command()
def get(name: Download, root: Root = None, as_json: AsJson = False) -> None:
    """Download cifar10 or cifar100, check it, and put it in place.

    \b
    Example: atas data get cifar10 --root data
    """
    from atas import data
    from atas._utils.console import DataProgress

    with DataProgress() as progress:
        folder = data.fetch(name, root, progress=progress)
    if as_json:
        typer.echo(json.dumps({"data": name, "folder": str(folder), "fetched": progress.has_work}, indent=2))
        return
    typer.echo(
        f"{name} is in {folder}" if progress.has_work else f"{name} is already in {folder} and intact; nothing to do"
    )


@app.command()
def check(name: Name, root: Root = None, size: Size = None, as_json: AsJson = False) -> None:
    """Read a data set and tell what it holds. CIFAR must have the official content.

    \b
    Example: atas data check cifar10 --root data
    """
    from atas import data
    from atas._utils.console import DataProgress

    with DataProgress() as progress:
        dataset = data.load(name, root, size=size, progress=progress)
    official, splits = data.official_hashes(name), {"train": dataset.train, "test": dataset.test}
    hashes = {half: split.fingerprint() for half, split in splits.items()}
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


@app.command()
def pack(
    folder: Photos,
    out: Packed,
    size: Annotated[int, typer.Option(help="Pixels along the short side.")] = 256,
    fit: Annotated[
        str,
        typer.Option(
            help="What becomes of the long side: crop (keep the centre), squash (press the whole image into a square), "
            "or keep (for jpeg alone: store all of it)."
        ),
    ] = "crop",
    format: Annotated[
        str, typer.Option(help="raw (pixels, fastest to read) or jpeg (about an eighth of the size).")
    ] = "raw",
    quality: Annotated[int, typer.Option(help="Of JPEG, 1 to 100.")] = 90,
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="Leave damaged images out, and note them in the manifest.")
    ] = False,
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Decode and resize a folder of images once.

    The few large files that come of it are read at full speed in training. Run again after it was stopped, by whatever,
    it goes on where it was.

    \b
    Example: atas data pack imagenette packed/imagenette --size 256
    """
    from atas import data
    from atas._utils.console import DataProgress
    from atas.errors import AtasError

    with DataProgress() as progress:
        try:
            made = data.pack(
                folder,
                out,
                size=size,
                fit=fit,
                format=format,
                quality=quality,
                skip_damaged=skip_damaged,
                workers=workers,
                progress=progress,
            )
        except KeyboardInterrupt as error:
            raise AtasError("stopped; the finished shards are kept: run the same command again to go on") from error
    counts = {half: sum(shard.count for shard in shards) for half, shards in made.splits.items()}
    size_in_bytes = sum(shard.bytes for shard in made.shards)
    if as_json:
        about = {"folder": str(out), "images": counts, "classes": list(made.classes), **made.settings}
        about |= {"shards": len(made.shards), "bytes": size_in_bytes, "skipped": len(made.skipped)}
        typer.echo(json.dumps(about | {"packed": progress.has_work}, indent=2))
        return
    done = "packed into" if progress.has_work else "already packed in"
    typer.echo(
        f"{done} {out}: {counts['train']:,} training and {counts['test']:,} test images of {len(made.classes)} "
        f"classes, {size} pixels ({fit}), {format_bytes(size_in_bytes)} in {len(made.shards)} shards of {format}"
    )
    if made.skipped:
        images, them = ("image", "it") if len(made.skipped) == 1 else ("images", "them")
        typer.echo(f"left out {len(made.skipped)} damaged {images}; {out}/manifest.json names {them}")


@app.command()
def verify(folder: Packed, workers: Workers = None, as_json: AsJson = False) -> None:
    """Compare every byte of a packed set with its checksums. What is damaged is named.

    \b
    Example: atas data verify packed/imagenette
    """
    from atas import data
    from atas._utils.console import DataProgress

    with DataProgress() as progress:
        found = data.verify(folder, workers=workers, progress=progress)
    if as_json:
        typer.echo(json.dumps({"folder": str(folder), "shards": len(found.shards), "intact": True}, indent=2))
        return
    typer.echo(f"{folder}: {len(found.shards)} shards, all as they were written")
