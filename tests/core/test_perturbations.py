"""What is remembered of each example: what goes in comes out, in each type."""

import pytest
import safetensors.torch
import torch

from atas.core.augment import View
from atas.core.perturbations import FullResolution
from atas.core.rng import CounterRNG
from atas.errors import UsageError
from atas.methods.atas import GradientNorms
from atas.threat import L2, Linf

SHAPE, PAD, EPS = (3, 6, 8), 2, 8 / 255


def make(threat=None, examples=9, dtype=torch.float32, **options):
    return FullResolution(threat or Linf(EPS), examples, SHAPE, pad=PAD, dtype=dtype, **options)


def batch(seed=0):
    index = torch.randperm(9, generator=torch.Generator().manual_seed(seed))[:5]
    return index, View.draw(CounterRNG(seed, torch.tensor(0), index), PAD)


@pytest.mark.parametrize(
    ("dtype", "error"),
    [(torch.float32, 0.0), (torch.float16, EPS * 2**-11), (torch.int8, EPS / 254)],
)
def test_load_returns_what_store_wrote(dtype, error):
    memory = make(dtype=dtype)
    index, view = batch()
    perturbation = (torch.rand(5, *SHAPE) * 2 - 1) * EPS
    perturbation.view(-1)[:5] = torch.tensor([EPS, -EPS, 0.0, EPS / 2, EPS / 254])
    memory.store(index, view, perturbation)
    read = memory.load(index, view, torch.float32)
    assert read.dtype == torch.float32
    assert (read - perturbation).abs().max() <= error * (1 + 1e-5)
    assert read.abs().max() <= EPS * (1 + 1e-6)


def test_int8_keeps_both_ends_and_zero_exactly():
    memory = make(dtype=torch.int8)
    index, view = batch()
    perturbation = torch.zeros(5, *SHAPE)
    perturbation[0], perturbation[1] = EPS, -EPS
    memory.store(index, view, perturbation)
    assert set(memory.delta.unique().tolist()) == {-127, 0, 127}
    torch.testing.assert_close(memory.load(index, view, torch.float64), perturbation.double(), atol=1e-8, rtol=0)


def test_int8_rounding_does_not_drift():
    """Reading and writing again and again keeps what is stored."""
    memory = make(dtype=torch.int8)
    memory.reset(0, 0)
    before = memory.delta.clone()
    for seed in range(5):
        index, view = batch(seed)
        memory.store(index, view, memory.load(index, view, torch.float32))
    assert torch.equal(memory.delta, before)


def test_int8_does_not_wrap_around():
    memory = make(dtype=torch.int8)
    index, view = batch()
    memory.store(index, view, torch.full((5, *SHAPE), 1.01 * EPS))
    assert memory.load(index, view, torch.float32).max() == pytest.approx(EPS)
    assert memory.load(index, view, torch.float32).min() == pytest.approx(EPS)


def test_a_budget_of_zero_remembers_zeros():
    memory = make(Linf(0.0), dtype=torch.int8)
    memory.reset(0, 0)
    index, view = batch()
    memory.store(index, view, torch.zeros(5, *SHAPE))
    assert not memory.load(index, view, torch.float32).any()


def test_int8_is_refused_for_l2_in_one_sentence():
    with pytest.raises(UsageError, match="int8") as caught:
        make(L2(0.5), dtype=torch.int8)
    message = str(caught.value)
    assert "L2" in message
    assert "torch.float16" in message
    assert "\n" not in message


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.bool])
def test_other_types_are_refused(dtype):
    with pytest.raises(UsageError, match="float32, float16 or int8; got torch"):
        make(dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_write_touches_its_window_alone(dtype):
    memory = make(dtype=dtype)
    memory.reset(0, 0)
    before = memory.delta.clone()
    index, view = batch()
    memory.store(index, view, torch.full((5, *SHAPE), EPS / 2))
    shown = torch.zeros_like(before, dtype=torch.bool)
    view.write(shown, index, torch.ones(5, *SHAPE, dtype=torch.bool))
    assert torch.equal(memory.delta[~shown], before[~shown])
    assert not torch.equal(memory.delta[shown], before[shown])


def test_perturbation_stored_in_one_view_is_loaded_in_the_frame_of_another():
    memory = make()
    index = torch.tensor([3])
    first = View(torch.tensor([0]), torch.tensor([1]), torch.tensor([True]), PAD)
    second = View(torch.tensor([2]), torch.tensor([4]), torch.tensor([False]), PAD)
    perturbation = torch.rand(1, *SHAPE)
    memory.store(index, first, perturbation)
    read = memory.load(index, second, torch.float32)[0]
    for row in range(SHAPE[1]):
        for column in range(SHAPE[2]):
            # Of the canvas: row 2 + row, column 4 + column; the first view shows it, mirrored, at row, 4 to the left.
            inside = 2 + row < SHAPE[1] and 4 + column - 1 < SHAPE[2]
            wanted = perturbation[0, :, 2 + row, SHAPE[2] - 1 - (4 + column - 1)] if inside else torch.zeros(3)
            assert torch.equal(read[:, row, column], wanted)


# Resets


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_a_reset_is_uniform_on_the_whole_canvas(dtype):
    memory = make(examples=400, dtype=dtype)
    memory.reset(0, 0)
    delta = memory.delta.double() * (EPS / 127 if dtype == torch.int8 else 1)
    assert delta.shape == (400, 3, 6 + 2 * PAD, 8 + 2 * PAD)
    assert delta.abs().max() <= EPS * (1 + 1e-3)
    count = delta.numel()
    assert abs(float(delta.mean())) < 4 * EPS / (3 * count) ** 0.5
    assert float(delta.var()) == pytest.approx(EPS**2 / 3, rel=0.02)
    per_place = delta.var(0)
    assert per_place.min() > 0.7 * EPS**2 / 3
    assert per_place.max() < 1.3 * EPS**2 / 3
    share = torch.histc(delta / EPS, bins=10, min=-1, max=1) / count
    assert (share - 0.1).abs().max() < 0.006


def test_a_reset_for_l2_stays_in_the_ball_of_the_canvas():
    memory = make(L2(0.5), examples=300)
    memory.reset(0, 0)
    radius = memory.delta.flatten(1).norm(dim=1)
    size = memory.delta[0].numel()
    assert radius.max() <= 0.5 + 1e-6
    uniform = (radius.double() / 0.5) ** size
    assert abs(float(uniform.mean()) - 0.5) < 4 / (12 * 300) ** 0.5


def test_resets_differ_between_epochs_examples_and_seeds():
    noises = []
    for seed, epoch in ((0, 0), (0, 9), (0, 19), (1, 9)):
        memory = make()
        memory.reset(seed, epoch)
        noises.append(memory.delta.flatten())
        assert abs(float(torch.corrcoef(memory.delta.flatten(1))[0, 1])) < 0.25
    correlation = torch.corrcoef(torch.stack(noises)) - torch.eye(4)
    assert correlation.abs().max() < 4 / len(noises[0]) ** 0.5


@pytest.mark.parametrize("threat", [Linf(EPS), L2(0.5)], ids=["linf", "l2"])
def test_a_reset_is_the_noise_of_each_example_however_many_there_are(threat):
    """Filled in parts, so as to bound its temporary memory; the parts do not show."""
    memory = FullResolution(threat, 5000, (1, 2, 2), pad=0, dtype=torch.float32)
    memory.reset(4, 9)
    expected = threat.sample(CounterRNG(4, torch.tensor(9), torch.arange(5000)), (1, 2, 2), reset=True)
    assert torch.equal(memory.delta, expected)


def test_equal_resets_are_equal_bits():
    first, second = make(dtype=torch.int8), make(dtype=torch.int8)
    first.reset(2, 9)
    second.reset(2, 9)
    assert torch.equal(first.delta, second.delta)


# State


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_state_comes_back(dtype):
    memory, other = make(dtype=dtype), make(dtype=dtype)
    memory.reset(0, 0)
    other.load_state_dict(safetensors.torch.load(safetensors.torch.save(memory.state_dict())))
    assert torch.equal(memory.delta, other.delta)
    assert list(memory.parameters()) == []


def test_cifar10_fits_into_250_megabytes():
    memory = FullResolution(Linf(EPS), 50_000, (3, 32, 32), pad=4, dtype=torch.int8, device="meta")
    assert memory.delta.shape == (50_000, 3, 40, 40)
    assert sum(buffer.nbytes for buffer in memory.buffers()) <= 250e6


def test_gradient_norms_change_where_they_are_written():
    norms = GradientNorms(6)
    assert set(norms.state_dict()) == {"average", "step_size"}
    norms.store(torch.tensor([4, 1]), torch.tensor([2.0, 3.0], dtype=torch.float64), torch.tensor([0.1, 0.2]))
    assert norms.squared_norm.tolist() == [0, 3, 0, 0, 2, 0]
    assert norms.step_size.tolist() == pytest.approx([0, 0.2, 0, 0, 0.1, 0])
    other = GradientNorms(6)
    other.load_state_dict(norms.state_dict())
    assert torch.equal(other.squared_norm, norms.squared_norm)
    assert list(norms.parameters()) == []


def test_more_than_fits_is_refused_in_a_sentence(monkeypatch):
    """On the host, and as a GPU says it."""
    with pytest.raises(UsageError, match=r"takes 360000.0 GB, more than the host has left; keep it at low resolution"):
        make(examples=10**12, dtype=torch.int8)

    def full(*shape, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(UsageError, match="more than the device has left; keep it with store=host, at low resolution"):
        make()
