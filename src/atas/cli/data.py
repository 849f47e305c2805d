"""`atas data`: download and check data sets, and pack your own images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from atas._utils.console import print_json, print_line
from atas._utils.formatting import format_bytes
from atas.cli import options

app = typer.Typer(help="Download and check data sets, and pack your own images.", no_args_is_help=True)

Name = Annotated[
    str,
    typer.Argument(
        help="A name of `atas ls data`, a folder, an .npz file, hf:owner/name, or package.module:function.",
        show_default=False,
    ),
]
Download = Annotated[
    str,
    typer.Argument(help="cifar10, cifar100, mnist, fashion-mnist, svhn or tiny-imagenet.", show_default=False),
]
Root = Annotated[
    Path | None,
    typer.Option(help="Data directory.", show_default="$ATAS_DATA, else ./data"),
]
Size = Annotated[
    int | None, typer.Option(help="Side of the images in pixels, for images in files.", show_default="224")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help=options.QUIET_HELP)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Packed = Annotated[Path, typer.Argument(help="Folder of packed data.", show_default=False)]
Photos = Annotated[
    Path, typer.Argument(help="Folder with train/<class>/ and test/<class>/ (or val/<class>/).", show_default=False)
]
Workers = Annotated[int | None, typer.Option(help="Worker processes.", show_default="one per CPU")]


@app.command()
def get(name: Download, root: Root = None, quiet: Quiet = False, as_json: AsJson = False) -> None:
    """Download a data set, verify it, and unpack it.

    \b
    Example: atas data get cifar10 --root data
    """
    from atas import data
    from atas._utils.console import DataProgress

    with DataProgress(quiet=quiet) as progress:
        folder = data.fetch(name, root, progress=progress)
    if as_json:
        print_json(json.dumps({"data": name, "folder": str(folder), "fetched": progress.has_work}, indent=2))
        return
    print_line(f"{name} is in {folder}" if progress.has_work else f"{name} is already in {folder} and intact")


@app.command()
def check(
    name: Name,
    root: Root = None,
    size: Size = None,
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="Leave out damaged images of a folder, and count them.")
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Read a data set and print a summary. Official sets must match their checksums.

    \b
    Example: atas data check cifar10 --root data
             atas data check photos --size 64
             atas data check cells.npz
    """
    from atas import data
    from atas._utils.console import DataProgress

    with DataProgress(quiet=quiet) as progress:
        dataset = data.load(name, root, size=size, skip_damaged=skip_damaged, progress=progress, trusted=True)
        splits = {"train": dataset.train, "test": dataset.test}
        hashes = {half: split.sha256(progress) for half, split in splits.items()}
    if as_json:
        contents = {
            half: {"images": len(split), "sha256": hashes[half], "official": data.is_official(name, hashes[half])}
            for half, split in splits.items()
        }
        summary = {"data": name, "shape": list(dataset.shape), "classes": list(dataset.train.classes)}
        skipped = {"skipped": [list(image) for image in dataset.skipped]} if skip_damaged else {}
        print_json(json.dumps(summary | contents | skipped, indent=2))
        return
    channels, height, width = dataset.shape
    print_line(f"{name}: {channels} x {height} x {width} pixels, {dataset.num_classes} classes")
    print_line(f"classes: {', '.join(dataset.train.classes)}")
    for half, split in splits.items():
        state = "official content" if data.is_official(name, hashes[half]) else "no official checksum"
        print_line(f"{half}: {len(split)} images, SHA-256 {hashes[half]} ({state})")
    if (gap := dataset.gap) is not None:
        print_line(gap)
    for path, why in dataset.skipped:
        print_line(f"left out: {path} ({why})")


@app.command()
def pack(
    folder: Photos,
    out: Packed,
    size: Annotated[int, typer.Option(help="Pixels along the short side.")] = 256,
    fit: Annotated[
        str,
        typer.Option(
            help="How to treat the long side: crop (to the centre), squash (resize to a square), or keep (store the "
            "whole image; jpeg only)."
        ),
    ] = "crop",
    format: Annotated[str, typer.Option(help="raw (pixels, fastest to read) or jpeg (about 1/8 of the size).")] = "raw",
    quality: Annotated[int, typer.Option(help="JPEG quality, 1 to 100.")] = 90,
    skip_damaged: Annotated[
        bool, typer.Option("--skip-damaged", help="Skip damaged images and list them in the manifest.")
    ] = False,
    workers: Workers = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Decode and resize a folder of images into a few large files.

    Training reads these files at full speed. If packing was interrupted, the same command resumes it.

    \b
    Example: atas data pack imagenette packed/imagenette --size 256
    """
    from atas import data
    from atas._utils.console import DataProgress
    from atas.errors import AtasError

    with DataProgress(quiet=quiet) as progress:
        try:
            packed = data.pack(
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
            raise AtasError("interrupted; finished shards are kept: run the same command again to resume") from error
    counts = {half: sum(shard.count for shard in shards) for half, shards in packed.splits.items()}
    size_in_bytes = sum(shard.bytes for shard in packed.shards)
    if as_json:
        summary = {"folder": str(out), "images": counts, "classes": list(packed.classes), **packed.settings}
        summary |= {"shards": len(packed.shards), "bytes": size_in_bytes, "skipped": len(packed.skipped)}
        print_json(json.dumps(summary | {"packed": progress.has_work}, indent=2))
        return
    done = "packed into" if progress.has_work else "already packed in"
    print_line(
        f"{done} {out}: {counts['train']:,} training and {counts['test']:,} test images of {len(packed.classes)} "
        f"classes, {size} pixels ({fit}), {format_bytes(size_in_bytes)} in {len(packed.shards)} {format} shards"
    )
    if packed.skipped:
        images, them = ("image", "it") if len(packed.skipped) == 1 else ("images", "them")
        print_line(f"skipped {len(packed.skipped)} damaged {images}; {out}/manifest.json lists {them}")


@app.command()
def verify(folder: Packed, workers: Workers = None, quiet: Quiet = False, as_json: AsJson = False) -> None:
    """Verify packed data against its checksums, and list damaged files.

    \b
    Example: atas data verify packed/imagenette
    """
    from atas import data
    from atas._utils.console import DataProgress

    with DataProgress(quiet=quiet) as progress:
        verified = data.verify(folder, workers=workers, progress=progress)
    if as_json:
        print_json(json.dumps({"folder": str(folder), "shards": len(verified.shards), "intact": True}, indent=2))
        return
    unchecked = "" if verified.has_checksum else "; the manifest, of an earlier version of atas, has no checksum"
    print_line(f"{folder}: {len(verified.shards)} shards, all intact{unchecked}")
