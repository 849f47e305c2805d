"""Where compiled kernels are kept, so that the next run starts in seconds."""

from __future__ import annotations

import os
from pathlib import Path


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
