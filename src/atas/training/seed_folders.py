"""Folders of several runs: the seeds of one recipe in `seed-0`, `seed-1`, ..., and runs side by side."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from atas.training.run import RunFolder

_SEED_FOLDER = re.compile(r"seed-(-?\d+)", re.ASCII)


def seed_folder(group: Path, seed: int) -> Path:
    """Return the folder of the run with this seed.

    >>> seed_folder(Path("runs/x"), 2).as_posix()
    'runs/x/seed-2'
    """
    return group / f"seed-{seed}"


def seed_runs(folder: Path) -> list[Path]:
    """Return the runs of a folder that holds the seeds of one recipe, in the order of the seeds; empty for others."""
    if _is_run(folder) or not folder.is_dir():
        return []
    seeds = {path: match for path in folder.iterdir() if (match := _SEED_FOLDER.fullmatch(path.name)) and _is_run(path)}
    return sorted(seeds, key=lambda path: int(seeds[path][1]))


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """Return the folders, with one that only holds runs replaced by its runs and groups of seeds, by name."""
    found = []
    for folder in folders:
        inner: list[Path] = []
        if folder.is_dir() and not _is_run(folder) and not seed_runs(folder):
            inner = [path for path in sorted(folder.iterdir()) if _is_run(path) or seed_runs(path)]
        found += inner or [folder]
    return found


def _is_run(path: Path) -> bool:
    return RunFolder(path).recipe.exists()
