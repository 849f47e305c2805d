"""Networks without kernels of ours, compiled for long evaluations."""

import pytest
import torch

import atas
from atas.evaluation import _cuda, _search, _work, evaluate


def network(x):
    return torch.stack([(x * x).sum((1, 2, 3)), x.sin().sum((1, 2, 3))], 1)


@pytest.fixture
def images():
    return torch.rand(6, 1, 3, 3, dtype=torch.float64)


def test_any_number_of_images_there_and_back(images):
    form = _cuda.compiled_network(network, images, backend="aot_eager")
    assert form is not None
    for count in (6, 5, 1, 17):
        x = torch.rand(count, 1, 3, 3, dtype=torch.float64, requires_grad=True)
        torch.testing.assert_close(form(x), network(x))
        found, expected = (torch.autograd.grad(way(x)[:, 0].sum(), x) for way in (form, network))
        torch.testing.assert_close(found, expected)
        with torch.no_grad():
            torch.testing.assert_close(form(x), network(x))


def test_a_network_that_cannot_be_compiled_stays_as_it_is(images):
    def asks_the_host(x):
        return network(x) * (2 if float(x.sum()) > 0 else 1)

    assert _cuda.compiled_network(asks_the_host, images, backend="aot_eager") is None


def test_autoattack_is_long_and_pgd_is_not():
    passes = {name: _work.passes_at_most([atas.attacks.create(name)], 10) for name in ("pgd50", "autoattack")}
    assert passes["pgd50"] == 50
    assert passes["autoattack"] >= 100 + 900 + 900 + 5000
    assert 1000 * passes["autoattack"] > _search._LONG > 10_000 * passes["pgd50"]


@pytest.mark.gpu
def test_the_same_verdicts_on_a_gpu(monkeypatch):
    """Compiled or not: half precision only searches."""
    torch.manual_seed(0)
    model = atas.models.create("resnet18", 10).cuda().eval()
    x = torch.rand(48, 3, 64, 64)
    with torch.no_grad():
        y = model(x.cuda()).argmax(1).cpu()
    found = {}
    for long in (0, _search._LONG):
        monkeypatch.setattr(_search, "_LONG", long)
        found[long] = evaluate(model, x, y, atas.Linf(0.2 / 255), attacks=["pgd10", "apgd-ce"], batch_size=20)
        assert found[long].protocol["search_precision"] == "float16"
    (one, other) = found.values()
    for name in ("pgd10", "apgd-ce"):
        assert int((one.correct[name] != other.correct[name]).sum()) <= 2


@pytest.mark.parametrize("right", ["float16", "bfloat16", None])
def test_the_first_half_precision_that_agrees_is_searched_with(monkeypatch, images, right):
    monkeypatch.setattr(_cuda, "half_precision", lambda model, kind, batch, **_: str(kind).removeprefix("torch."))
    monkeypatch.setattr(_cuda, "agrees", lambda logits, judge, x: logits == right)
    whole = _search.Runner(network, network, "float32", torch.device("cpu"), lanes=2)
    found = _search._on_cuda(whole, torch.nn.Identity(), images, halves=True, long=False, say=print)
    assert found.precision == (right or "float32")
    assert found.logits == (right or network)


@pytest.mark.gpu
def test_a_network_of_large_numbers_is_searched_in_bfloat16():
    """Float16 ends at 65,504."""
    torch.manual_seed(0)
    model = atas.models.create("preact-resnet18", 10).cuda().eval()
    x = torch.rand(64, 3, 32, 32)
    with torch.no_grad():
        model.conv1.weight *= 1e6  # on its way past every block it is never normalised
        y = model(x.cuda()).argmax(1).cpu()
    found = evaluate(model, x, y, atas.Linf(0.2 / 255), attacks=["pgd10"])
    assert found.protocol["search_precision"] == "bfloat16"
