"""Where tests of kernels run, on a GPU or on the CPU in Triton's interpreter; and all registered kernels."""

import contextlib
from collections import Counter
from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton", reason="the kernels need Triton")

import atas.ops.triton  # noqa: E402, F401  (registers the kernels)
from atas.core import dispatch  # noqa: E402
from atas.core.augment import View  # noqa: E402
from atas.core.crop_shift import ShiftView  # noqa: E402
from atas.core.erasing import ErasedView  # noqa: E402
from atas.ops.triton.cross_entropy import accumulate  # noqa: E402
from atas.training.cuda_graph_engine import register_kernels  # noqa: E402
from atas.training.metrics import accumulate_metrics  # noqa: E402

ON_GPU = torch.cuda.is_available() and not triton.knobs.runtime.interpret
DEVICE = "cuda" if ON_GPU else "cpu"
HALF = torch.bfloat16 if ON_GPU else torch.float16  # the interpreter does not multiply bfloat16

register_kernels()  # now, so that the first engine finds it done: it would refuse kernels that are being counted
dispatch.implements(accumulate_metrics)(accumulate)  # where no GPU is, the line above registers none
VIEWS = ["shift", "shift unflipped", "erased crop", "erased shift", "erased nothing"]
KERNELS = {  # of the package; tests register some of their own
    row.function: row.kernel
    for row in dispatch.table()
    if row.kernel is not None and row.function.__module__.startswith("atas.")
}


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


def draw_view(kind, draw, size, pad=2):
    """A view of each image; erased ones have rectangles for most of the images."""
    shift, flip = min(size) - 2, "unflipped" not in kind
    shown = View.draw(draw, pad, flip) if "crop" in kind else ShiftView.draw(draw, size, shift, flip)
    if "erased" not in kind:
        return shown
    return ErasedView.draw(draw, shown, size, 0.0 if kind == "erased nothing" else 0.8, (0.1, 0.5))
