"""The memory on a coarse grid: what is written is read, where it belongs, in each type."""

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atas.core.augment import View
from atas.core.dispatch import use_fast_ops
from atas.core.perturbations import FullResolution, LowResolution
from atas.core.resized_crop import BoxView, to_box_view
from atas.core.rng import CounterRNG
from atas.errors import UsageError
from atas.threat import L2, Linf

EPS, EXAMPLES, BATCH = 4 / 255, 10, 6
SHAPE = (2, 256, 256)


def make(threat=None, examples=EXAMPLES, dtype=torch.int8, shape=SHAPE, **options):
    memory = LowResolution(threat or Linf(EPS), examples, shape, dtype=dtype, **options)
    memory.reset(0, 0)
    return memory


def batch(kind, seed=0, size=224, **options):
    index = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(seed))[:BATCH]
    draw = CounterRNG(seed, torch.tensor(0), index)
    if kind == "crop":
        return index, BoxView.crop(draw, size, size * 8 // 7)
    return index, BoxView.resized(draw, size, SHAPE[1:], **options)


def outside(view, grid=32):
    """The cells whose reach, two cells wide, lies outside of each window."""
    edges = torch.arange(grid, dtype=torch.float64)
    first, last = (edges - 0.5) / grid, (edges + 1.5) / grid

    def beside(begin, length):
        return (last <= begin[:, None]) | (first >= (begin + length)[:, None])

    rows, columns = beside(view.top, view.height), beside(view.left, view.width)
    return rows[:, :, None] | columns[:, None, :]


# What the write-back must hold: the released code loses it.


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8], ids=str)
@pytest.mark.parametrize("kind", ["crop", "resized"])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**30), size=st.sampled_from([224, 160, 128, 97]), smallest=st.sampled_from([0.08, 0.35]))
def test_load_returns_what_store_wrote(kind, dtype, seed, size, smallest):
    memory = make(dtype=dtype)
    before = memory.delta.clone()
    index, view = batch(kind, seed, size, **({} if kind == "crop" else {"scale": (smallest, 1.0)}))
    generator = torch.Generator().manual_seed(seed)
    grids = (torch.rand(BATCH, SHAPE[0], 32, 32, generator=generator) * 2 - 1) * EPS
    perturbation = view.read(grids)
    memory.store(index, view, perturbation)
    read = memory.load(index, view, torch.float32)
    assert read.shape == perturbation.shape
    error = (read - perturbation).abs().mean((1, 2, 3))
    assert float(error.max()) <= 0.1 * EPS
    assert float(error.mean()) <= 0.06 * EPS
    assert float(read.abs().max()) <= EPS * (1 + 1e-6)
    beside = outside(view)[:, None].expand(-1, SHAPE[0], -1, -1)
    assert torch.equal(memory.delta[index][beside], before[index][beside])
    others = torch.ones(EXAMPLES, dtype=torch.bool)
    others[index] = False
    assert torch.equal(memory.delta[others], before[others])
    assert not torch.equal(memory.delta[index], before[index])


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["crop", "resized"])
def test_epochs_of_random_windows_do_not_wear_the_memory_off(kind, dtype):
    """Each writes what it reads, so nothing drifts: not by rounding, not by resampling."""
    memory = make(dtype=dtype)
    before = memory.delta.clone()
    for seed in range(10):
        index, view = batch(kind, seed, 128)
        memory.store(index, view, memory.load(index, view, torch.float32))
    torch.testing.assert_close(memory.delta, before, atol=1e-5 * EPS if dtype == torch.float32 else 0, rtol=0)


@pytest.mark.parametrize("kind", ["crop", "resized"])
def test_the_memory_in_float64_is_the_boxes(kind):
    memory = make(dtype=torch.float64)
    index, view = batch(kind, size=64)
    before = memory.delta[index]
    torch.testing.assert_close(memory.load(index, view, torch.float64), view.read(before), atol=1e-16, rtol=0)
    new = torch.rand(BATCH, SHAPE[0], 64, 64, dtype=torch.float64) * 2 * EPS - EPS
    memory.store(index, view, new)
    expected = view.update(before, new).clamp(-EPS, EPS)
    torch.testing.assert_close(memory.delta[index], expected, atol=1e-16, rtol=0)


def test_a_corner_stays_a_corner():
    """A single-step attack writes +-eps alone; where the sign is one over a cell, so is what comes back."""
    memory = make(dtype=torch.int8)
    index, view = batch("crop")
    sign = torch.where(torch.rand(BATCH, SHAPE[0], 7, 7) < 0.5, -EPS, EPS)
    perturbation = sign.repeat_interleave(32, 2).repeat_interleave(32, 3)
    memory.store(index, view, perturbation)
    read = memory.load(index, view, torch.float32)
    middle = torch.zeros(224, dtype=torch.bool)
    for first in range(8, 224, 32):
        middle[first : first + 16] = True
    inner = read[..., middle, :][..., middle] - perturbation[..., middle, :][..., middle]
    assert float(inner.abs().mean()) < 0.08 * EPS


def test_load_does_not_depend_on_the_size_of_the_view():
    memory = make()
    index, view = batch("resized")
    small = BoxView(view.top, view.left, view.height, view.width, view.flip, (112, 112))
    large = torch.nn.functional.avg_pool2d(memory.load(index, view, torch.float32), 2)
    difference = (memory.load(index, small, torch.float32) - large).abs()
    assert float(difference.mean()) < 0.01 * EPS


def test_a_padded_view_leaves_what_lies_beside_the_image_out():
    memory = make(shape=(2, 32, 32), dtype=torch.float32)
    index = torch.arange(4)
    view = View.draw(CounterRNG(0, torch.tensor(0), index), pad=4)
    perturbation = (torch.rand(4, 2, 32, 32) * 2 - 1) * EPS
    memory.store(index, view, perturbation)
    read, inside = memory.load(index, view, torch.float32), view.apply(torch.ones(4, 2, 32, 32)).bool()
    torch.testing.assert_close(read[inside], perturbation[inside])


# Its own terms


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8], ids=str)
def test_a_reset_is_uniform_on_the_grid(dtype):
    memory = LowResolution(Linf(EPS), 200, (3, 224, 224), grid=8, dtype=dtype)
    memory.reset(0, 3)
    delta = memory.decode(memory.delta, torch.float64)
    assert delta.shape == (200, 3, 8, 8)
    assert float(delta.abs().max()) <= EPS * (1 + 1e-3)
    assert float(delta.var()) == pytest.approx(EPS**2 / 3, rel=0.03)
    expected = memory.threat.sample(CounterRNG(0, torch.tensor(3), torch.arange(200)), (3, 8, 8), reset=True)
    torch.testing.assert_close(delta.float(), expected, atol=EPS / 250, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_an_l2_ball_holds_what_is_read(dtype):
    threat = L2(0.5)
    memory = make(threat, dtype=dtype)
    index, view = batch("resized", size=64)
    assert float(memory.load(index, view, torch.float32).flatten(1).norm(dim=1).max()) <= 0.5 * (1 + 1e-5)
    smooth = view.read(torch.randn(BATCH, SHAPE[0], 32, 32))
    memory.store(index, view, threat.clip(smooth))
    read = memory.load(index, view, torch.float32)
    assert float((read - threat.clip(smooth)).flatten(1).norm(dim=1).max()) < 0.2 * 0.5


def test_state_comes_back():
    memory, other = make(), make()
    memory.reset(5, 1)
    other.load_state_dict(safetensors.torch.load(safetensors.torch.save(memory.state_dict())))
    assert list(memory.state_dict()) == ["delta"]
    assert torch.equal(memory.delta, other.delta)
    assert list(memory.parameters()) == []


@pytest.mark.parametrize(("dtype", "gigabytes"), [(torch.float16, 7.87), (torch.int8, 3.94)], ids=str)
def test_the_training_set_of_imagenet_fits_a_gpu(dtype, gigabytes):
    memory = LowResolution(Linf(EPS), 1_281_167, (3, 224, 224), dtype=dtype, device="meta")
    assert memory.nbytes / 1e9 == pytest.approx(gigabytes, abs=0.005)


def test_autocast_leaves_precision_alone():
    plain, mixed = make(dtype=torch.float32), make(dtype=torch.float32)
    index, view = batch("resized", size=40)
    new = torch.rand(BATCH, SHAPE[0], 40, 40) * EPS
    plain.store(index, view, new)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed.store(index, view, new)
        read = mixed.load(index, view, torch.float32)
    assert torch.equal(plain.delta, mixed.delta)
    assert torch.equal(plain.load(index, view, torch.float32), read)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["crop", "resized"])
def test_a_compiled_write_is_the_plain_one(kind):
    torch._dynamo.reset()
    plain, compiled = make(dtype=torch.float32), make(dtype=torch.float32)
    index, view = batch(kind, size=40 if kind == "resized" else 56)
    new = torch.rand(BATCH, SHAPE[0], *view.size) * EPS
    plain.store(index, view, new)
    with use_fast_ops("aot_eager"):
        compiled.store(index, view, new)
    torch.testing.assert_close(compiled.delta, plain.delta, atol=1e-6 * EPS, rtol=0)


def test_wrong_settings_are_refused_by_name():
    with pytest.raises(UsageError, match="grid must be at least 1 cell a side; got 0"):
        make(grid=0)
    with pytest.raises(UsageError, match=r"int8 .* L2"):
        make(L2(0.5))
    with pytest.raises(UsageError, match=r"unknown store of the memory 'hots'; did you mean 'host'\?"):
        make(store="hots")
    memory = FullResolution(Linf(EPS), EXAMPLES, (2, 16, 16), pad=0, dtype=torch.int8)
    index, view = batch("crop", size=14)
    with pytest.raises(UsageError, match="grid=32"):
        memory.load(index, view, torch.float32)
    with pytest.raises(UsageError, match="grid=32"):
        memory.store(index, view, torch.zeros(BATCH, 2, 14, 14))


def test_a_view_of_pixels_is_a_view_of_boxes():
    view = View.draw(CounterRNG(0, torch.tensor(0), torch.arange(5)), pad=2)
    boxes = to_box_view(view, (8, 16))
    assert boxes.size == (8, 16)
    assert torch.equal(boxes.top * 8, (view.top - 2).double())
    assert torch.equal(boxes.left * 16, (view.left - 2).double())
    assert to_box_view(boxes, (8, 16)) is boxes
