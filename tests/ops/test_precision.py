"""Inside an evaluation float32 is float32; outside everything is as it was."""

import warnings

import pytest
import torch
from torch import nn

import atas
from atas.ops.precision import low_precision_copy, strict_float32

CPU, LOW = torch.device("cpu"), torch.bfloat16
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


class Wider(nn.Conv2d):
    """A convolution with a constructor of its own."""

    def __init__(self, channels):
        super().__init__(channels, 2 * channels, 3)


class Standardised(nn.Conv2d):
    """A convolution that computes with its weight first."""

    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight - weight.mean((1, 2, 3), keepdim=True), bias)


class TiedToEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(5, 4), nn.Linear(4, 5)
        self.linear.weight = self.embedding.weight


def dtypes(model):
    return {name: parameter.dtype for name, parameter in low_precision_copy(model, LOW).named_parameters()}


def test_only_weights_that_go_to_a_kernel_as_they_are_are_copied():
    for layer in (nn.Conv2d(1, 2, 3), nn.Linear(2, 3), nn.ConvTranspose1d(1, 2, 3), Wider(1)):
        assert dtypes(layer) == {"weight": LOW, "bias": LOW}
    own = nn.Conv2d(1, 2, 3)
    own.forward = lambda x: x
    parametrized = nn.utils.parametrizations.orthogonal(nn.Linear(2, 2))
    for layer in (
        nn.utils.spectral_norm(nn.Conv2d(1, 2, 3)), Standardised(1, 2, 3), own,
        parametrized, nn.BatchNorm2d(3), nn.Embedding(3, 4),
    ):  # fmt: skip
        assert set(dtypes(layer).values()) == {torch.float32}


def test_a_weight_with_another_use_stays_one_weight():
    model = TiedToEmbedding()
    copy = low_precision_copy(model, LOW)
    assert copy.linear.weight is copy.embedding.weight is model.embedding.weight
    assert copy.linear.bias.dtype == LOW
    assert len(list(copy.parameters())) == len(list(model.parameters()))


@pytest.mark.parametrize("name", atas.models.names())
@pytest.mark.slow
def test_the_networks_of_the_package_keep_their_copies(name):
    """Every weight and bias of a convolution and a linear layer, and nothing else."""
    model = atas.models.create(name, 10)
    layers = (nn.modules.conv._ConvNd, nn.Linear)
    cast = {
        f"{path}.{kind}" for path, m in model.named_modules() if isinstance(m, layers) for kind in ("weight", "bias")
    }
    assert dtypes(model) == {key: LOW if key in cast else torch.float32 for key, _ in model.named_parameters()}


def test_advice_on_older_switches_is_silent(monkeypatch):
    """PyTorch 2.9 warns when they are read."""

    def advise():
        warnings.warn("Please use the new API settings to control TF32 behavior", UserWarning, stacklevel=2)
        return "highest"

    monkeypatch.setattr(torch, "get_float32_matmul_precision", advise)
    with strict_float32(CPU):
        pass
