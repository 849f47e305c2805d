"""Where tests of kernels run, on a GPU or on the CPU in Triton's interpreter; and all registered kernels."""

import contextlib
from collections import Counter
from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton", reason="the kernels need Triton")

import atas.ops.triton  # noqa: E402, F401  (registers the kernels)
from atas.core import dispatch  # noqa: E402
from atas.ops.triton.cross_entropy import accumulate  # noqa: E402
from atas.training.cuda_graph_engine import register_kernels  # noqa: E402
from atas.training.metrics import accumulate_metrics  # noqa: E402

ON_GPU = torch.cuda.is_available() and not triton.knobs.runtime.interpret
DEVICE = "cuda" if ON_GPU else "cpu"
HALF = torch.bfloat16 if ON_GPU else torch.float16  # the interpreter does not multiply bfloat16

register_kernels()  # now, so that the first engine finds it done: it would refuse kernels that are being counted
dispatch.implements(accumulate_metrics)(accumulate)  # where no GPU is, the line above registers none
KERNELS = {row.function: row.kernel for row in dispatch.table() if row.kernel is not None}


def run_kernel(function, *args):
    """Run the kernel of a function; it has to support the arguments."""
    result = KERNELS[function](*args)
    assert result is not NotImplemented
    return result


@contextlib.contextmanager
def count_kernel_calls():
    """Count by function how often its kernel was called and supported the arguments."""
    calls = Counter()

    def counting(function, kernel):
        def call(*args, **kwargs):
            result = kernel(*args, **kwargs)
            calls[function] += result is not NotImplemented
            return result

        return call

    counted = {function: counting(function, kernel) for function, kernel in KERNELS.items()}
    with mock.patch.dict(dispatch._kernels, counted):
        yield calls
