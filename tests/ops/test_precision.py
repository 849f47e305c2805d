"""Inside an evaluation float32 is float32; outside everything is as it was."""

import pytest
import torch

from atas.ops.precision import strict_float32

CPU = torch.device("cpu")
B = torch.backends
SETTINGS = {
    "all": B,
    "cudnn": B.cudnn,
    "cuda.matmul": B.cuda.matmul,
    "cudnn.conv": B.cudnn.conv,
    "cudnn.rnn": B.cudnn.rnn,
    "mkldnn.matmul": B.mkldnn.matmul,
    "mkldnn.conv": B.mkldnn.conv,
    "mkldnn.rnn": B.mkldnn.rnn,
}
OPERATIONS = [name for name in SETTINGS if "." in name]


def old_switches():
    found = []
    for read in (torch.get_float32_matmul_precision, lambda: B.cuda.matmul.allow_tf32, lambda: B.cudnn.allow_tf32):
        try:
            found.append(read())
        except RuntimeError:
            found.append("contradiction")
    return found


def state():
    return {name: setting.fp32_precision for name, setting in SETTINGS.items()}, old_switches()


@pytest.fixture(autouse=True)
def _put_back():
    """PyTorch's switches as they are at the start of a process."""
    yield
    for setting in SETTINGS.values():
        setting.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    B.cuda.matmul.fp32_precision = "none"
    B.mkldnn.matmul.fp32_precision = "none"
    B.cudnn.allow_tf32 = True


def old_way():
    B.cuda.matmul.allow_tf32 = True
    B.cudnn.allow_tf32 = False


def contradiction():
    torch.set_float32_matmul_precision("high")
    B.cuda.matmul.fp32_precision = "ieee"
    B.cudnn.conv.fp32_precision = "ieee"


CALLERS = {
    "untouched": lambda: None,
    "old switches": old_way,
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "new, for all": lambda: setattr(B, "fp32_precision", "tf32"),
    "new, for cudnn": lambda: setattr(B.cudnn, "fp32_precision", "tf32"),
    "new, for one": lambda: setattr(B.cuda.matmul, "fp32_precision", "tf32"),
    "contradiction": contradiction,
}


@pytest.mark.parametrize("caller", list(CALLERS))
def test_strict_float32_turns_tf32_off_inside_and_restores_it(caller):
    CALLERS[caller]()
    before = state()
    with strict_float32(CPU):
        new, old = state()
        assert {new[name] for name in OPERATIONS} == {"ieee"}
        assert old == ["highest", False, False]
    if caller != "contradiction":  # whose older switches nobody can read
        assert state() == before
    assert state()[0] == before[0]
    # Not only the values are back: what followed its parent does so still.
    B.fp32_precision = "ieee"
    following = state()[0]
    B.fp32_precision = "none"
    CALLERS[caller]()
    B.fp32_precision = "ieee"
    assert state()[0] == following


def test_strict_float32_restores_tf32_after_an_error():
    torch.set_float32_matmul_precision("high")
    before = state()
    with pytest.raises(KeyboardInterrupt), strict_float32(CPU):
        raise KeyboardInterrupt
    assert state() == before


def test_benchmark_is_left_alone():
    before = B.cudnn.benchmark
    try:
        for value in (True, False):
            B.cudnn.benchmark = value
            with strict_float32(CPU):
                assert B.cudnn.benchmark is value
            assert B.cudnn.benchmark is value
    finally:
        B.cudnn.benchmark = before


@pytest.mark.gpu
@pytest.mark.parametrize("caller", list(CALLERS))
def test_tf32_is_off_in_effect(caller):
    """TF32 keeps ten bits of each factor: an error of about 1e-3 relative, where float32 has about 1e-6."""
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(1024, 1024, device="cuda", generator=generator) for _ in range(2))
    image = torch.randn(8, 64, 32, 32, device="cuda", generator=generator)
    kernel = torch.randn(64, 64, 3, 3, device="cuda", generator=generator)

    def errors():
        product, convolved = a @ b, torch.conv2d(image, kernel)
        exact = a.double() @ b.double(), torch.conv2d(image.double(), kernel.double())
        return [float((f - e).norm() / e.norm()) for f, e in zip((product, convolved), exact, strict=True)]

    CALLERS[caller]()
    with strict_float32(torch.device("cuda")):
        assert max(errors()) < 1e-5
    if caller == "new, for all":
        assert min(errors()) > 1e-4, "outside, TF32 must be on, or this test shows nothing"
