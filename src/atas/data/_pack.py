"""Packing: a folder of image files becomes a packed set, by several processes; it can be stopped at any moment."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import PIL

from atas._files import held
from atas._version import __version__
from atas.data._folder import labels_of, listings
from atas.data._manifest import KIND, MANIFEST, VERSION, Manifest, read_manifest
from atas.data._shards import Outcome, Settings, Work, cut, make
from atas.data._sources import Progress
from atas.data._target import begin, check_room, finished, make_folder, settings_of, sweep, write
from atas.data._team import shared_array, spread, team_size
from atas.errors import FEW, DataError, UsageError, few

DAMAGED = "damaged.txt"
_TICK = 0.2  # seconds between looks at how far the workers are


def pack(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    size: int = 256,
    fit: str = "crop",
    format: str = "raw",
    quality: int = 90,
    skip_damaged: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Pack folder/train/<class>/ and folder/test/<class>/ (or val/) into `out`, for `load("packed", out)`.

    Images become RGB with `size` pixels along the short side. `fit` is what happens to the long one: `crop` keeps the
    centre, as `load("imagefolder")` does; `squash` presses the whole image into a square; `keep`, for `jpeg` alone,
    stores the whole image, of which readers then see the centre. `raw` stores pixels, `jpeg` files of that `quality`.
    Called again after it was stopped, it goes on; finished shards are compared with their checksums and kept. Damaged
    images are all named in an error, or with `skip_damaged` left out and noted in the manifest.

    >>> pack("imagenette", "packed/imagenette", size=256)  # doctest: +SKIP
    """
    source, target = Path(folder), Path(out)
    settings = settings_of(size, fit, format, quality)
    processes = team_size(workers)
    train, test = listings(source)
    for half in (train, test):
        if target.resolve().is_relative_to(half.root.resolve()):
            raise UsageError(f"{target} lies among the images that are to be packed; choose a folder elsewhere")
    shards = [
        work
        for name, half in (("train", train), ("test", test))
        for work in cut(name, source, half.files, labels_of(half).tolist(), settings.size)
    ]
    fingerprint = hashlib.sha256("".join(work.source for work in shards).encode()).hexdigest()
    about: dict[str, Any] = {"files": sum(len(work.files) for work in shards), "sha256": fingerprint}
    make_folder(target)
    with held(target / ".lock", f"another process packs into {target}; wait for it or choose another folder"):
        if (target / MANIFEST).exists():
            return finished(target, settings, about)
        sweep(target)
        begin(target, settings)
        check_room(target, settings, shards)
        try:
            outcomes = _make_all(shards, target, settings, skip_damaged, processes, progress)
        finally:
            sweep(target)
        _name_damaged(target, about["files"], outcomes, skip=skip_damaged)
        return _finish(target, settings, tuple(train.classes), about, outcomes)


def _make_all(
    shards: list[Work], target: Path, settings: Settings, skip: bool, workers: int, progress: Progress | None
) -> list[Outcome]:
    through = shared_array((len(shards),), np.int64)
    total = sum(len(work.files) for work in shards)
    report = progress or (lambda what, done, total: None)

    def work(number: int) -> Outcome:
        def count(done: int) -> None:
            through[number] = done

        return make(shards[number], target, settings, skip=skip, count=count)

    outcomes = {}
    report("packing", 0, total)
    for outcome in spread(work, range(len(shards)), workers, "packs images", _TICK):
        report("packing", int(through.sum()), total)
        if outcome is not None:
            outcomes[outcome.name] = outcome
    return [outcomes[work.name] for work in shards]


def _name_damaged(target: Path, files: int, outcomes: list[Outcome], *, skip: bool) -> None:
    faults = [fault for outcome in outcomes for fault in outcome.faults]
    report = target / DAMAGED
    if not faults or skip:
        report.unlink(missing_ok=True)
        return
    lines = "".join(f"{name}\t{why}\n" for name, why in faults)
    write(report, lines.encode(errors="replace").decode())  # a name need not be text
    shown = few([f"{name} ({why})" for name, why in faults])
    listed = f", all listed in {report}" if len(faults) > FEW else ""
    noun, them = ("image", "it") if len(faults) == 1 else ("images", "them")
    raise DataError(
        f"{len(faults)} {noun} of {files} cannot be decoded: {shown}{listed}; mend or remove {them}, or leave {them} "
        f"out with --skip-damaged, and run the command again: the other shards are kept"
    )


def _finish(
    target: Path, settings: Settings, classes: tuple[str, ...], about: dict[str, Any], outcomes: list[Outcome]
) -> Manifest:
    made = {half: [o.shard for o in outcomes if o.shard and o.name.startswith(half)] for half in ("train", "test")}
    for half, shards in made.items():
        if not shards:
            raise DataError(f"no {half} image could be decoded; look at what the files are")
    document = {
        "kind": KIND,
        "version": VERSION,
        "made_by": {"atas": __version__, "pillow": PIL.__version__},
        "settings": asdict(settings),
        "source": about,
        "classes": classes,
        "splits": {half: [asdict(shard) for shard in shards if shard] for half, shards in made.items()},
        "skipped": [fault for outcome in outcomes for fault in outcome.faults],
    }
    known = {outcome.shard.name for outcome in outcomes if outcome.shard}
    for path in target.iterdir():  # shards of an earlier attempt, when there were more files
        if path.name.startswith(("train-", "test-")) and path.stem not in known:
            path.unlink()
    write(target / MANIFEST, json.dumps(document, indent=1) + "\n")
    return read_manifest(target)
