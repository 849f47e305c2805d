"""The cache of compiled kernels, so that the next run starts in seconds."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return $ATAS_CACHE, or `atas` in the user's cache folder."""
    if named := os.environ.get("ATAS_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atas"


def use_compile_cache() -> None:
    """Have Triton and torch.compile cache compiled code in one directory, unless the user has chosen others.

    The directory survives a reboot, unlike PyTorch's default under /tmp. Triton stores absolute paths in it, so its
    kernels are compiled again if it is moved.
    """
    for name, part in (("TRITON_CACHE_DIR", "triton"), ("TORCHINDUCTOR_CACHE_DIR", "inductor")):
        os.environ.setdefault(name, str(cache_dir() / part))
