"""The cache of compiled kernels, so that the next run starts in seconds."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from atas._utils.files import read_json, write_text

_LOCATION_FILE = "place.txt"  # where the folder was when it was last used


def cache_dir() -> Path:
    """$ATAS_CACHE, or `atas` in the user's cache folder."""
    if named := os.environ.get("ATAS_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atas"


def use_compile_cache() -> None:
    """Have Triton and torch.compile keep what they compile in one directory, unless the user has chosen others.

    It survives a reboot, unlike PyTorch's default under /tmp, and can be copied to another machine with the same kind
    of GPU and the same versions.
    """
    for name, part in (("TRITON_CACHE_DIR", "triton"), ("TORCHINDUCTOR_CACHE_DIR", "inductor")):
        os.environ.setdefault(name, str(cache_dir() / part))
    triton = cache_dir() / "triton"
    if os.environ["TRITON_CACHE_DIR"] == str(triton) and triton.is_dir():
        with contextlib.suppress(OSError):  # what cannot be put right is compiled anew
            _relocate(triton.absolute())


def _relocate(triton: Path) -> None:
    """Triton's lists of a kernel's files name them by their whole path: after a move they would all be missed."""
    location = triton / _LOCATION_FILE
    if location.exists() and location.read_text(encoding="utf-8") == str(triton):
        return
    for path in triton.glob("*/__grp__*"):
        listed = read_json(path).get("child_paths") or {}
        files = {name: str(path.parent / Path(file).name) for name, file in listed.items()}
        if files != listed:
            write_text(path, json.dumps({"child_paths": files}))
    write_text(location, str(triton))
