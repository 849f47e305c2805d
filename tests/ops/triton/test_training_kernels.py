"""The small functions by hand against those that they stand for, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from helpers.kernels import DEVICE, KERNELS, VIEWS, draw_view, run_kernel
from torch import nn

import atas
from atas import threat
from atas.core import autograd, perturbations, rng
from atas.core.augment import View
from atas.core.crop_shift import ShiftView
from atas.core.dispatch import use_fast_ops
from atas.core.erasing import ErasedView
from atas.core.resized_crop import to_box_view
from atas.core.rng import CounterRNG
from atas.data import loader
from atas.data.loader import DeviceLoader
from atas.methods import atas as method_atas
from atas.methods import base, targets
from atas.recipes import load
from atas.training import metrics
from atas.training.ema import EMA, FusedEMA
from atas.training.engine import Engine

pytestmark = pytest.mark.usefixtures("division_as_on_a_gpu")
EPS = 8 / 255
BATCHES = [(1, (3, 8, 8)), (5, (1, 8, 8)), (5, (3, 5, 7)), (2, (3, 32, 32)), (128, (1, 4, 4))]
KEPT = [torch.int8, torch.float16, torch.float32]
CASES = [(*each, "crop") for each in BATCHES]
CASES += [(*BATCHES[2], kind) for kind in VIEWS] + [(*BATCHES[0], "erased shift"), (*BATCHES[3], "erased shift")]


@pytest.fixture(params=CASES, ids=str)
def case(request):
    """Images with many pixels at the ends of [0, 1], a batch of them in some order, and a view of each."""
    batch, shape, kind = request.param
    images = (torch.rand(batch + 4, *shape, device=DEVICE) * 1.5 - 0.25).clamp(0, 1)
    index = torch.randperm(batch + 4, device=DEVICE)[:batch]
    view = draw_view(kind, CounterRNG(1, torch.tensor(3, device=DEVICE), index), shape[1:])
    return images[index].contiguous(), index, view


def remembered(kind, images, shape, pad=2, eps=EPS):
    """A memory that is full of noise."""
    kept = perturbations.FullResolution(atas.Linf(eps), images, shape, pad=pad, dtype=kind, device=DEVICE)
    kept.reset(7, 0)
    return kept


def test_pixels_that_are_not_shown_keep_their_perturbation():
    """Here, against single pixels and not against the plain version."""
    index, shape = torch.tensor([4, 1, 0], device=DEVICE), (2, 6, 9)
    view = draw_view("erased shift", CounterRNG(5, torch.tensor(2, device=DEVICE), index), shape[1:])
    kept, change = remembered(torch.int8, 6, shape), torch.full((3, *shape), EPS, device=DEVICE)
    before, shift = kept.delta.clone(), view.view
    run_kernel(perturbations.store_pixels, kept, index, view, change)
    written = torch.zeros_like(before, dtype=torch.bool)
    for example in range(3):
        top, left, height, width = (getattr(view, name)[example] for name in ("top", "left", "height", "width"))
        for row in range(shift.height[example]):
            for column in range(shift.width[example]):
                y, x = shift.top[example] + row, shift.left[example] + column
                x = shape[2] - 1 - x if shift.flip[example] else x
                if not (top <= y < top + height and left <= x < left + width):
                    source = shift.source_top[example] + row + 2, shift.source_left[example] + column + 2
                    written[index[example], :, source[0], source[1]] = True
    assert (view.height > 0).any()
    assert torch.equal(kept.delta, torch.where(written, 127, before))


@pytest.mark.parametrize("kind", KEPT)
def test_load_start_kernel_loads_stored_perturbations(case, kind):
    x, index, view = case
    kept = remembered(kind, len(x) + 4, x.shape[1:])
    assert torch.equal(
        run_kernel(base.projected_start, kept, x, index, view), base.projected_start(kept, x, index, view)
    )


@pytest.mark.parametrize("kind", KEPT)
@pytest.mark.parametrize("eps", [EPS, 0.0, 1])
def test_store_kernel_stores_perturbations(case, kind, eps):
    x, index, view = case
    ours, theirs = (remembered(kind, len(x) + 4, x.shape[1:], eps=eps) for _ in range(2))
    change = torch.randn_like(x) * (eps or 1)
    change.view(-1)[:6] = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 1000], device=DEVICE) * eps / 127
    assert run_kernel(perturbations.store_pixels, ours, index, view, change) is None
    perturbations.store_pixels(theirs, index, view, change)
    assert torch.equal(ours.delta, theirs.delta)


@pytest.mark.parametrize("eps", [EPS, 0.0, 1])
@pytest.mark.parametrize("size", ["number", "one", "each"])
def test_ascend(case, eps, size):
    x, _, _ = case
    point = x + (2 * torch.rand_like(x) - 1) * eps
    gradient = torch.randn_like(x) * (torch.rand_like(x) > 0.2)
    length = {
        "number": eps / 4,
        "one": torch.tensor(1.25 * eps, device=DEVICE),
        "each": torch.rand(len(x), device=DEVICE) * eps,
    }[size]
    arguments = atas.Linf(eps), point, gradient, length, x
    assert torch.equal(run_kernel(threat.ascend, *arguments), threat.ascend(*arguments))


def test_ascend_takes_any_layout_and_lets_nan_through():
    x, gradient = torch.rand(3, 3, 4, 4, device=DEVICE), torch.randn(3, 3, 4, 4, device=DEVICE)
    length = torch.tensor([0.01, float("nan"), 0.02], device=DEVICE)
    arguments = atas.Linf(EPS), x, gradient.to(memory_format=torch.channels_last), length, x
    found = run_kernel(threat.ascend, *arguments)
    torch.testing.assert_close(found, threat.ascend(*arguments), atol=0, rtol=0, equal_nan=True)
    assert found[1].isnan().all()


@pytest.mark.parametrize("seed", [0, 12345678901234567])
def test_random_start(case, seed):
    x, index, _ = case
    for epoch in (0, 29):
        arguments = atas.Linf(EPS), x, seed, torch.tensor(epoch, device=DEVICE), index
        assert torch.equal(run_kernel(threat.random_start, *arguments), threat.random_start(*arguments))


def assert_same_memory(found, expected, exact):
    """Codes are equal, except where what was to be stored lies in the middle of two; `exact` is that, in levels."""
    differs = found != expected
    assert ((found.int() - expected.int()).abs() <= 1).all()
    middle = (found.double() + expected.double())[differs] / 2
    assert ((exact[differs] - middle).abs() < 1e-3).all()


@pytest.mark.parametrize("epoch", [0, 5])
@pytest.mark.parametrize(
    "options", [{}, {"clip": None}, {"beta": 0.0}, {"c": 0.3, "max_step": 0.2, "clip": (0.01, 0.1)}]
)
def test_step_kernel_ascends_and_stores_as_pytorch(case, epoch, options):
    x, index, view = case
    ours, theirs = (
        atas.ATAS(atas.Linf(EPS), len(x) + 4, x.shape[1:], pad=2, device=DEVICE, **options) for _ in range(2)
    )
    generator = torch.Generator(DEVICE).manual_seed(0)
    past = torch.rand(len(x) + 4, generator=generator, device=DEVICE)
    gradient = torch.randn(x.shape, generator=generator, device=DEVICE) * past[: len(x)].view(-1, 1, 1, 1)
    gradient *= torch.rand(x.shape, generator=generator, device=DEVICE) > 0.1
    gradient[0] = 0
    for method in (ours, theirs):
        method.start_epoch(epoch)
        method.shrink_steps(0.7)
        method.norms.squared_norm.copy_(past)
    start = base.projected_start(ours.memory, x, index, view)
    found = run_kernel(method_atas.adaptive_step_and_store, ours, x, index, view, start, gradient)
    expected = method_atas.adaptive_step_and_store(theirs, x, index, view, start, gradient)
    warming = epoch < ours.warmup_epochs  # then nothing hangs on the order in which squares are added up
    close = {"atol": 0, "rtol": 0 if warming else 2e-6}
    torch.testing.assert_close(found, expected, atol=0 if warming else 1e-7, rtol=0)
    torch.testing.assert_close(ours.norms.squared_norm, theirs.norms.squared_norm, **close)
    torch.testing.assert_close(ours.norms.step_size, theirs.norms.step_size, **close)
    exact = torch.zeros(theirs.memory.delta.shape, dtype=torch.float64, device=DEVICE)
    view.write(exact, index, (expected - x).double() / (EPS / 127))
    assert_same_memory(ours.memory.delta, theirs.memory.delta, exact)
    if warming:
        assert torch.equal(ours.memory.delta, theirs.memory.delta)


@pytest.mark.parametrize("kind", [torch.float16, torch.float32])
def test_step_kernel_stores_perturbations_in_floats(case, kind):
    x, index, view = case
    ours, theirs = (
        atas.ATAS(atas.Linf(EPS), len(x) + 4, x.shape[1:], pad=2, device=DEVICE, dtype=kind, warmup_epochs=0)
        for _ in range(2)
    )
    gradient = torch.randn_like(x)
    found = run_kernel(method_atas.adaptive_step_and_store, ours, x, index, view, x, gradient)
    expected = method_atas.adaptive_step_and_store(theirs, x, index, view, x, gradient)
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=0)
    tolerance = 1e-7 if kind == torch.float32 else 1e-4
    torch.testing.assert_close(ours.memory.delta, theirs.memory.delta, atol=tolerance, rtol=0)


@pytest.mark.parametrize("function", [autograd.cross_entropy, autograd.cross_entropy_sum])
@pytest.mark.parametrize(("batch", "classes"), [(1, 2), (5, 10), (128, 10), (37, 100), (9, 1000)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_cross_entropy(function, batch, classes, kind):
    logits = (torch.randn(batch, classes, device=DEVICE) * 8).to(kind).requires_grad_()
    y = torch.randint(classes, (batch,), device=DEVICE)
    expected, found = function(logits, y), run_kernel(function, logits, y)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=2e-6)
    for incoming in (1.0, -0.37):
        incoming = torch.tensor(incoming, device=DEVICE)
        ours, theirs = (torch.autograd.grad(loss, logits, incoming, retain_graph=True)[0] for loss in (found, expected))
        assert ours.dtype == kind
        close = {"atol": 1e-6, "rtol": 1e-5} if kind == torch.float32 else {"atol": 1e-6, "rtol": 8e-3}
        torch.testing.assert_close(ours, theirs, **close)


@pytest.mark.parametrize(("batch", "classes"), [(1, 2), (5, 10), (128, 10), (37, 100), (9, 1000)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_cross_entropy_with_distributions(batch, classes, kind):
    logits = (torch.randn(batch, classes, device=DEVICE) * 8).to(kind).requires_grad_()
    wanted = torch.rand(batch, classes, device=DEVICE).softmax(1)
    function = autograd.soft_cross_entropy
    expected, found = function(logits, wanted), run_kernel(function, logits, wanted)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=2e-6)
    for incoming in (1.0, -0.37):
        incoming = torch.tensor(incoming, device=DEVICE)
        ours, theirs = (torch.autograd.grad(loss, logits, incoming, retain_graph=True)[0] for loss in (found, expected))
        assert ours.dtype == kind
        close = {"atol": 1e-6, "rtol": 1e-5} if kind == torch.float32 else {"atol": 1e-6, "rtol": 8e-3}
        torch.testing.assert_close(ours, theirs, **close)
    certain = torch.nn.functional.one_hot(wanted.argmax(1), classes).float()
    torch.testing.assert_close(
        run_kernel(function, logits, certain), autograd.cross_entropy(logits, wanted.argmax(1)), atol=1e-6, rtol=2e-6
    )


@pytest.mark.parametrize(("batch", "classes"), [(1, 2), (5, 10), (128, 10), (37, 100), (9, 1000)])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("remember", [True, False])
def test_targets(batch, classes, share, smoothing, remember):
    remembered = {"share": share, "decay": 0.7, "from_epoch": 1}
    ours, theirs = (
        targets.RememberedPredictions(classes, smoothing=smoothing, **remembered)
        if share
        else targets.LabelTargets(smoothing=smoothing)
        for _ in range(2)
    )
    for each in (ours, theirs):
        each.setup(batch + 4, DEVICE)
    index = torch.randperm(batch + 4, device=DEVICE)[:batch]
    for epoch in range(3):
        logits = torch.randn(batch, classes, device=DEVICE).bfloat16() * 8
        y = torch.randint(classes, (batch,), device=DEVICE)
        draw = CounterRNG(0, torch.tensor(epoch, device=DEVICE), index)
        found = run_kernel(targets.make_targets, ours, logits, y, index, draw, remember)
        expected = targets.make_targets(theirs, logits, y, index, draw, remember)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
        if share:
            tolerance = 1e-6 if classes <= 100 else 1e-3  # kept in float16
            torch.testing.assert_close(ours.average, theirs.average, atol=tolerance, rtol=tolerance)


def test_targets_of_other_kinds_are_left_to_others():
    class Own(targets.LabelTargets):
        """A user's own."""

    logits, y = torch.randn(2, 3, device=DEVICE), torch.tensor([0, 1], device=DEVICE)
    for own in (Own(), targets.LabelTargets(smoothing=0.1, noise="random")):
        draw = CounterRNG(0, torch.tensor(0, device=DEVICE), y)
        assert KERNELS[targets.make_targets](own, logits, y, y, draw, True) is NotImplemented
    wide = torch.zeros(2, 3, dtype=torch.float64, device=DEVICE)
    assert KERNELS[autograd.soft_cross_entropy](logits, wide) is NotImplemented


@pytest.mark.parametrize("channels_last", [False, True])
def test_averages_are_those_of_the_plain_version_to_the_bit(channels_last):
    """Also where a size is no multiple of a block; tensors of other types are averaged all the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 40, 7), nn.BatchNorm2d(40), nn.Flatten(), nn.Linear(40, 130)).to(DEVICE)
    model.register_buffer("wide", torch.rand(3, dtype=torch.float64, device=DEVICE))
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    plain, fused = EMA(model, 0.6), FusedEMA(model, 0.6)
    for _ in range(6):
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.add_(torch.randn_like(tensor.double()).to(tensor.dtype))
        plain.update()
        fused.update()
    fused.copy_integers()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, fused.state_dict()[name]), name


@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_the_loss_of_logits_far_apart(kind):
    """Margins that no exponential holds, and ties."""
    values = torch.tensor([-6e4, -1e4, -105.0, 0.0, 1.0, 88.8, 105.0, 1e4, 6e4], device=DEVICE)
    logits = values[torch.randint(len(values), (40, 5), device=DEVICE)].to(kind).requires_grad_()
    y = torch.randint(5, (40,), device=DEVICE)
    expected, found = (function(logits, y) for function in (autograd.cross_entropy, KERNELS[autograd.cross_entropy]))
    torch.testing.assert_close(found, expected)
    expected, found = (torch.autograd.grad(loss, logits)[0] for loss in (expected, found))
    assert found.isfinite().all()
    torch.testing.assert_close(found, expected)


def test_the_loss_of_infinite_logits_is_no_number():
    y = torch.zeros(2, dtype=torch.long, device=DEVICE)
    for bad in (float("nan"), float("inf")):
        logits = torch.tensor([[1.0, bad, 0.0], [1.0, 2.0, 3.0]], device=DEVICE)
        assert run_kernel(autograd.cross_entropy, logits, y).isnan()
    logits = torch.tensor([[500.0, -500.0], [0.0, 30.0]], device=DEVICE)
    assert run_kernel(autograd.cross_entropy_sum, logits, y + 1) == 1000


@pytest.mark.parametrize(("batch", "classes"), [(1, 2), (5, 10), (128, 10), (37, 100), (9, 1000)])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adaptive", [False, True])
def test_accumulate_kernel_adds_up_metrics(batch, classes, kind, adaptive):
    logits = torch.randint(-2, 3, (batch, classes), device=DEVICE).to(kind)  # many ties
    logits[0, 1] = float("nan")
    y = logits.argmax(1)
    y[::3] = 0
    index = torch.randperm(200, device=DEVICE)[:batch]
    lengths = torch.rand(200, device=DEVICE) if adaptive else None
    found, expected = (torch.arange(4.0, dtype=torch.float64, device=DEVICE) for _ in range(2))
    loss = torch.tensor(0.123, device=DEVICE)
    for _ in range(2):
        assert run_kernel(metrics.accumulate_metrics, found, loss, logits, y, index, lengths) is None
        metrics.accumulate_metrics(expected, loss, logits, y, index, lengths)
    assert torch.equal(found[[0, 1, 3]], expected[[0, 1, 3]])
    torch.testing.assert_close(found[2], expected[2], atol=0, rtol=1e-6)


def test_training_kernels_decline_unsupported_arguments():
    x, index = torch.rand(2, 3, 4, 4, device=DEVICE), torch.arange(2, device=DEVICE)
    view, now = View.centre(2, 2, x.device), torch.tensor(0, device=DEVICE)
    kept = perturbations.FullResolution(atas.L2(1.0), 2, (3, 4, 4), pad=2, dtype=torch.float16, device=DEVICE)
    slanted = remembered(torch.int8, 2, (3, 4, 4))
    slanted.delta = slanted.delta.to(memory_format=torch.channels_last)
    linf = atas.Linf(EPS)
    grid = perturbations.LowResolution(linf, 2, (3, 4, 4), grid=2, dtype=torch.int8, device=DEVICE)
    away = perturbations.FullResolution(linf, 2, (3, 4, 4), pad=2, dtype=torch.int8, device=DEVICE, store="host")
    boxes = to_box_view(view, (4, 4))
    others = draw_view("erased shift", CounterRNG(0, now, index), (5, 4))  # of images of another size
    double, learning, y = x.double(), x.clone().requires_grad_(), torch.zeros(2, dtype=torch.long, device=DEVICE)
    for function, *arguments in [
        (loader.gather_views, x, index, view),
        (loader.gather_views, (255 * x).byte(), index, boxes),
        (loader.gather_views, (255 * x).byte(), index, others),
        (base.projected_start, remembered(torch.int8, 2, (3, 4, 4)), x, index, others),
        (perturbations.store_pixels, remembered(torch.int8, 2, (3, 4, 4)), index, others, x),
        (base.projected_start, grid, x, index, view),
        (base.projected_start, away, x, index, view),
        (base.projected_start, remembered(torch.int8, 2, (3, 4, 4)), x, index, boxes),
        (perturbations.store_pixels, away, index, view, x),
        (method_atas.adaptive_step_and_store, atas.ATAS(linf, 2, (3, 4, 4), grid=2), x, index, view, x, x),
        (base.projected_start, kept, x, index, view),
        (base.projected_start, slanted, x, index, view),
        (perturbations.store_pixels, kept, index, view, x),
        (perturbations.store_pixels, remembered(torch.int8, 2, (3, 4, 4)), index, view, double),
        (threat.ascend, atas.L2(1.0), x, x, 0.1, x),
        (threat.ascend, atas.Linf(EPS), double, double, 0.1, double),
        (threat.ascend, atas.Linf(EPS), learning, x, 0.1, x),
        (threat.random_start, atas.L2(1.0), x, 0, now, index),
        (method_atas.adaptive_step_and_store, atas.ATAS(atas.L2(1.0), 2, (3, 4, 4)), x, index, view, x, x),
        (autograd.cross_entropy, double[:, 0, 0], y),
        (autograd.cross_entropy, x, y),
        (autograd.cross_entropy, x[:, 0, 0], x[:, 0, 0]),
        (metrics.accumulate_metrics, torch.zeros(4, device=DEVICE), double.sum(), x[:, 0, 0], y, index, None),
    ]:
        assert KERNELS[function](*arguments) is NotImplemented, function.__name__


SHAPE, EXAMPLES, BATCH = (3, 8, 8), 14, 6


def shifted_and_erased(draw):
    """Views as `data.view = "cropshift"` and `data.erase` draw them."""
    return ErasedView.draw(draw, ShiftView.draw(draw, SHAPE[1:], 3), SHAPE[1:], 0.7)


def make_engine(name: str, views=None) -> Engine:
    """A tiny network on random images."""
    file = f"cifar10-preact-resnet18-{'plus-30s' if name == 'atas-plus' else name}"
    settings = load(file).with_values(
        {"engine.precision": "float32", "training.batch_size": BATCH, "training.epochs": 9, "data.pad": 2}
    )
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 6, 3, padding=1, bias=False)
    model = nn.Sequential(convolution, nn.BatchNorm2d(6), nn.Softplus(), nn.Flatten(), nn.Linear(6 * 64, 4))
    images, labels = torch.randint(256, (EXAMPLES, *SHAPE), dtype=torch.uint8), torch.randint(4, (EXAMPLES,))
    place = torch.device(DEVICE)
    batches = DeviceLoader(images, labels, batch_size=BATCH, pad=2, flip=True, seed=0, device=place, views=views)
    own = dict(settings.method.settings)
    own |= {"batch_size": BATCH} if "batch_size" in atas.methods.settings(name) else {}
    own |= {"classes": 4} if atas.methods.takes_classes(name) else {}
    method = atas.methods.create(name, settings.threat, EXAMPLES, SHAPE, pad=2, device=place, **own)
    return Engine(settings, model.to(place), method, batches)


# Parts of these have no kernels: targets, and terms of the loss, some with weights up to 100.
NEED_A_COMPILER = ("sora", "aaer", "elle", "fgsm-pgi", "tdat", "liet", "fgsm-pco")
NEED_A_COMPILER += ("fgsm-pgk", "fgsm-uap", "fgsm-rs-cs", "fgsm-mep-cs")


@pytest.mark.parametrize("name", [name for name in atas.methods.names() if atas.methods.get(name).compilable])
@pytest.mark.parametrize("epoch", [0, 6])
def test_whole_steps(name, epoch, monkeypatch):
    more = {"backend": None, "atol": 1e-5} if name in NEED_A_COMPILER else {}
    compare_steps(make_engine(name), make_engine(name), epoch, monkeypatch, **more)


@pytest.mark.parametrize("name", ["atas", "atta", "pgd"])
def test_whole_steps_on_shifted_and_erased_images(name, monkeypatch):
    compare_steps(make_engine(name, shifted_and_erased), make_engine(name, shifted_and_erased), 6, monkeypatch)


def compare_steps(ours, theirs, epoch, monkeypatch, backend="inductor", atol=2e-6):
    """Two steps and the short last batch; nothing is left to a compiler."""
    with monkeypatch.context() as patch:
        patch.delattr(torch, "compile")
        with use_fast_ops(backend):
            ours.start_epoch(epoch, 0)
            for _ in range(3):
                ours.step()
    theirs.start_epoch(epoch, 0)
    for _ in range(3):
        theirs.step()
    expected = theirs.state_tensors()
    for key, found in ours.state_tensors().items():
        if found.dtype == torch.int8:
            assert (found == expected[key]).double().mean() > 0.999, key
        else:
            torch.testing.assert_close(found, expected[key], atol=atol, rtol=2e-5, msg=key)


def test_second_derivatives_are_refused():
    logits = torch.randn(3, 4, device=DEVICE, requires_grad=True)
    loss = run_kernel(autograd.cross_entropy, logits, torch.zeros(3, dtype=torch.long, device=DEVICE))
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(loss, logits, create_graph=True)


def test_purposes_have_salts_of_their_own():
    from atas.ops.triton.rng import stream_key

    salts = {stream_key(seed, purpose) for seed in range(9) for purpose in rng.Stream}
    assert len(salts) == 9 * len(rng.Stream)
    assert all(-(2**31) <= number < 2**31 for number in salts)
