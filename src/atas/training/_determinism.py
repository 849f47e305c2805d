"""The same bits from the same state, on CUDA too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def determinism(wanted: bool) -> Iterator[None]:
    """Inside, where wanted, only algorithms whose results do not change from run to run.

    An operation of a user's model that has none raises an error that names it. cuDNN's search for the fastest algorithm
    is off, since its choice hangs on timings; wanted or not, it is put back to what it was.
    """
    algorithms, searching = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    try:
        if wanted:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
            torch.backends.cudnn.benchmark = False
        yield
    finally:
        if wanted:  # the call imports torch's compiler, which takes a second
            torch.use_deterministic_algorithms(algorithms)
        torch.utils.deterministic.fill_uninitialized_memory = filling  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = searching
