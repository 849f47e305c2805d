"""The folder that a set is packed into: what may be there already, and whether it has room."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from atas._files import read_json, write_text
from atas._text import in_bytes
from atas.data._decode import FITS
from atas.data._manifest import MANIFEST, SUFFIXES, Manifest, read_manifest
from atas.data._shards import Settings, Work, cannot_write
from atas.errors import DataError, UsageError, unknown

PLAN = "plan.json"  # the settings, written first


def settings_of(size: int, fit: str, format: str, quality: int) -> Settings:
    """The settings, if they make sense together."""
    if fit not in FITS:
        raise unknown("fit", fit, FITS)
    if format not in SUFFIXES:
        raise unknown("format", format, SUFFIXES)
    if not isinstance(size, int) or size < 1:
        raise UsageError(f"size is {size}, expected a number of pixels from 1 up, such as 256")
    if not 1 <= quality <= 100:
        raise UsageError(f"quality is {quality}, expected 1 to 100, such as 90")
    if fit == "keep" and format == "raw":
        raise UsageError("raw images are all of one size, so fit must be crop or squash; keep is for format jpeg")
    return Settings(size, fit, format, quality if format == "jpeg" else None)


def make_folder(target: Path) -> None:
    """Make the folder of a set, or see that what is in it is one."""
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {target} ({error.strerror}); choose another") from error
    ours = any((target / name).exists() for name in (MANIFEST, PLAN))
    if not ours and any(not path.name.startswith(".") for path in target.iterdir()):
        raise UsageError(f"{target} is not empty and holds no packed set; choose another folder")


def finished(target: Path, settings: Settings, about: dict[str, Any]) -> Manifest:
    """The set that is there, if it is the one that is asked for."""
    found = read_manifest(target)
    _compare(target, found.settings, settings)
    if found.source != about:
        raise UsageError(
            f"{target} was packed from {found.source['files']} files that have changed since; pack into another "
            f"folder, or remove {target / MANIFEST} to bring it up to date"
        )
    return found


def begin(target: Path, settings: Settings) -> None:
    """Note what is being made, or see that an earlier attempt was of the same."""
    plan = target / PLAN
    if earlier := read_json(plan):
        _compare(target, earlier, settings)
    write(plan, json.dumps(asdict(settings)))


def write(path: Path, text: str) -> None:
    """Replace a small file of a set."""
    try:
        write_text(path, text)
    except OSError as error:
        raise cannot_write(path, error) from error


def sweep(target: Path) -> None:
    """Remove what processes that were ended in the middle of a shard have left."""
    for stale in target.glob(".*.tmp"):
        stale.unlink(missing_ok=True)


def _compare(target: Path, found: dict[str, Any], settings: Settings) -> None:
    wanted = asdict(settings)
    changed = [f"{key} {found.get(key)} became {value}" for key, value in wanted.items() if found.get(key) != value]
    if changed:
        raise UsageError(
            f"{target} holds a set that was packed in another way ({', '.join(changed)}); use the same options, choose "
            f"another folder, or remove this one"
        )


def check_room(target: Path, settings: Settings, shards: list[Work]) -> None:
    """Whether raw images will fit, as their size is known; others run until the disk is full."""
    if settings.format != "raw":
        return
    unmade = [work for work in shards if not (target / f"{work.name}.json").exists()]
    needed = sum(len(work.files) for work in unmade) * 3 * settings.size**2
    free = shutil.disk_usage(target).free
    if needed > free:
        raise DataError(
            f"{target} needs {in_bytes(needed)} more and its disk has {in_bytes(free)} left; make room, choose another "
            f"place, or pack with --format jpeg, which takes about an eighth"
        )
