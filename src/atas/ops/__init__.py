"""Fast implementations: CUDA graphs, numeric precision, Triton kernels. Everything else works without them.

Importing this package does not import Triton; `enable_kernels` does.
"""

from __future__ import annotations

import importlib
import importlib.util
import os

import torch

from atas._utils.system import cache_dir


def enable_kernels() -> bool:
    """Register the Triton kernels for the functions that they implement; return whether this machine can run them.

    Triton comes with PyTorch for CUDA.
    """
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return False
    importlib.import_module("atas.ops.triton")
    return True


def use_compile_cache() -> None:
    """Have Triton and torch.compile cache compiled code in one directory, unless the user has chosen others.

    The directory survives a reboot, unlike PyTorch's default under /tmp. Triton stores absolute paths in it, so its
    kernels are compiled again if it is moved.
    """
    for name, part in (("TRITON_CACHE_DIR", "triton"), ("TORCHINDUCTOR_CACHE_DIR", "inductor")):
        os.environ.setdefault(name, str(cache_dir() / part))
