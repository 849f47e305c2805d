"""Where compiled kernels are kept, so that the next run starts in seconds."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from atas._files import read_json, write_text

_PLACE = "place.txt"  # where the folder was when it was last used


def folder() -> Path:
    """$ATAS_CACHE, or `atas` in the user's cache folder."""
    if named := os.environ.get("ATAS_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atas"


def keep_compiled() -> None:
    """Have Triton and PyTorch's compiler keep what they compile in one folder, unless the user has chosen others.

    It outlives a restart, which PyTorch's own choice under /tmp does not, and it can be copied to another machine with
    the same kind of GPU and the same versions.
    """
    for name, part in (("TRITON_CACHE_DIR", "triton"), ("TORCHINDUCTOR_CACHE_DIR", "inductor")):
        os.environ.setdefault(name, str(folder() / part))
    triton = folder() / "triton"
    if os.environ["TRITON_CACHE_DIR"] == str(triton) and triton.is_dir():
        with contextlib.suppress(OSError):  # what cannot be put right is compiled anew
            _settle(triton.absolute())


def _settle(triton: Path) -> None:
    """Triton's lists of a kernel's files name them by their whole path: after a move they would all be missed."""
    note = triton / _PLACE
    if note.exists() and note.read_text(encoding="utf-8") == str(triton):
        return
    for path in triton.glob("*/__grp__*"):
        listed = read_json(path).get("child_paths") or {}
        files = {name: str(path.parent / Path(file).name) for name, file in listed.items()}
        if files != listed:
            write_text(path, json.dumps({"child_paths": files}))
    write_text(note, str(triton))
