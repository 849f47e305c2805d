"""Fast implementations: CUDA graphs, numeric precision, Triton kernels. Everything else works without them.

Importing this package does not import Triton; `enable_kernels` does.
"""

from __future__ import annotations

import importlib
import importlib.util

import torch


def enable_kernels() -> bool:
    """Register the Triton kernels for the functions that they implement; return whether this machine can run them.

    Triton comes with PyTorch for CUDA.
    """
    if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return False
    importlib.import_module("atas.ops.triton")
    return True
