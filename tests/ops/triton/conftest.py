"""Tests of kernels. Without a GPU they run in Triton's interpreter, in a process of their own:

TRITON_INTERPRET=1 pytest tests/ops/triton

Triton reads the variable when the kernels are imported, so they would run interpreted in all other tests as well.
"""

import os
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# NumPy computes for the interpreter, and warns about infinities, NaN and overflow that the tests are about.
WARNINGS = ("ignore::RuntimeWarning:triton", "ignore::DeprecationWarning:triton")


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        for warning in WARNINGS:
            item.add_marker(pytest.mark.filterwarnings(warning))
        if not INTERPRETED and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, or Triton's interpreter: make test-kernels"))
