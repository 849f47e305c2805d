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


@pytest.hookimpl(tryfirst=True)  # before items are selected by -m gpu
def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        for warning in WARNINGS:
            item.add_marker(pytest.mark.filterwarnings(warning))
        if INTERPRETED:
            continue
        item.add_marker(pytest.mark.gpu)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, or Triton's interpreter: make test-kernels"))


@pytest.fixture
def division_as_on_a_gpu(monkeypatch):
    """On a GPU torch divides by a number as a multiplication by its inverse; here the CPU does so, too."""
    if not INTERPRETED:
        return
    divide = torch.Tensor.__truediv__

    def by_inverse(x, divisor):
        if isinstance(divisor, int | float) and x.dtype == torch.float32:
            return x * float(torch.tensor(1 / divisor, dtype=torch.float32))
        return divide(x, divisor)

    monkeypatch.setattr(torch.Tensor, "__truediv__", by_inverse)
