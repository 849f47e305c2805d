"""Methods that remember, with each kind of memory, wherever it lives."""

import pytest
import torch

import atas
from atas.core.augment import View
from atas.core.perturbations import FullResolution, LowResolution
from atas.core.resized_crop import BoxView
from atas.errors import CheckpointError, DataError, UsageError

SHAPE, EXAMPLES, BATCH, EPS = (3, 12, 12), 10, 4, 8 / 255
REMEMBERING = ["atta", "atas", "atas-literal"]

remembering = pytest.mark.parametrize("name", REMEMBERING)


def make(name, **options):
    method = atas.methods.create(name, atas.Linf(EPS), EXAMPLES, SHAPE, **{"pad": 0, **options})
    method.start_epoch(6, 30)
    return method


def train(method, model, make_images, steps=6, view=None):
    """A few steps; returns what was trained on."""
    images, labels = make_images(EXAMPLES, SHAPE), torch.arange(EXAMPLES) % 4
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator, inputs = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        index = torch.randperm(EXAMPLES, generator=generator)[:BATCH]
        x, seen = (images[index], None) if view is None else view(images[index], generator=generator)
        inputs.append(method.step(model, optimizer, x, labels[index], index, seen).inputs)
    return inputs


def views(size):
    return lambda x, generator: atas.random_resized_view(x, size, generator=generator)


@remembering
def test_a_grid_of_every_pixel_is_the_memory_of_every_pixel(small_net, make_images, name):
    """Where a cell is a pixel and the whole image is shown, reading and writing are exact, so training is the same."""
    inputs = []
    for grid in (None, 12):
        method = make(name, grid=grid, dtype=torch.float32)
        method.memory.delta.copy_(torch.linspace(-EPS, EPS, method.memory.delta.numel()).view_as(method.memory.delta))
        inputs.append(train(method, small_net(), make_images))
    for full, coarse in zip(*inputs, strict=True):
        torch.testing.assert_close(coarse, full, atol=1e-6, rtol=0)


@remembering
@pytest.mark.parametrize("show", ["resized", "crop", "padded"])
@pytest.mark.parametrize("norm", [atas.Linf(EPS), atas.L2(0.5)], ids=str)
def test_every_view_trains_inside_the_budget(small_net, make_images, name, show, norm):
    own = {
        "resized": lambda x, generator: atas.random_resized_view(x, 9, generator=generator),
        "crop": lambda x, generator: atas.random_crop_view(x, 14, of=16, generator=generator),
        "padded": lambda x, generator: atas.random_view(x, pad=2, generator=generator),
    }
    method = atas.methods.create(name, norm, EXAMPLES, SHAPE, grid=4, pad=2)
    method.start_epoch(6, 30)
    before = method.memory.delta.clone()
    for inputs in train(method, small_net(), make_images, view=own[show]):
        assert inputs.min() >= 0
        assert inputs.max() <= 1
    assert not torch.equal(method.memory.delta, before)
    assert method.memory.delta.shape == (EXAMPLES, 3, 4, 4)


def test_the_next_epoch_starts_where_the_last_one_ended(small_net, make_images):
    """Shown the same way again, at another size even: the start is the perturbation of before, coarsely."""
    method, x = make("atta", grid=6, dtype=torch.float32), make_images(BATCH, SHAPE) * 0.5 + 0.25
    index, y = torch.arange(BATCH), torch.arange(BATCH)
    shown, view = atas.random_resized_view(x, 24, scale=(0.5, 1.0))
    reached = method.perturb(small_net(), shown, y, index, view) - shown
    again = BoxView(view.top, view.left, view.height, view.width, view.flip, (12, 12))
    start = method.load_start(again.apply(x), index, again) - again.apply(x)
    coarse = torch.nn.functional.avg_pool2d(reached, 2)
    correlation = torch.corrcoef(torch.stack([start.flatten(), coarse.flatten()]))[0, 1]
    assert correlation > 0.7


@remembering
@pytest.mark.parametrize("grid", [None, 4])
def test_the_host_holds_what_the_device_would(small_net, make_images, name, grid):
    """In your own loop: nothing to call, and the same bits."""
    show = None if grid is None else views(10)
    runs = []
    for store in ("device", "host"):
        method = make(name, grid=grid, store=store)
        inputs = train(method, small_net(), make_images, view=show)
        method.start_epoch(9, 30)  # a reset
        inputs += train(method, small_net(), make_images, view=show)
        runs.append((inputs, method.state_dict()))
    for one, other in zip(runs[0][0], runs[1][0], strict=True):
        assert torch.equal(one, other)
    assert list(runs[0][1]) == list(runs[1][1])
    assert all(torch.equal(runs[0][1][key], runs[1][1][key]) for key in runs[0][1])


@pytest.mark.parametrize("store", ["device", "host"])
def test_state_goes_from_one_store_to_the_other(small_net, make_images, store):
    method, other = make("atas", grid=4), make("atas", grid=4, store=store, seed=1)
    train(method, small_net(), make_images, view=views(10))
    other.load_state_dict(method.state_dict())
    first, second = (train(m, small_net(), make_images, view=views(8)) for m in (method, other))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_statistics_are_measured_at_the_stored_perturbations(small_net, make_images):
    """Without an attack, and without a trace in the method."""
    method, index, y = make("atas", dtype=torch.float32), torch.tensor([3, 1]), torch.tensor([0, 1])
    x, view = make_images(2, SHAPE) * 0.5 + 0.25, View.centre(2, 0)
    before = {name: value.clone() for name, value in method.state_dict().items()}
    found = method.batchnorm_inputs(None, atas.methods.Batch(x, y, index, view))
    assert float(method.memory.delta.abs().max()) <= EPS
    torch.testing.assert_close(found, x + method.memory.delta[index])
    assert all(torch.equal(value, before[name]) for name, value in method.state_dict().items())


@pytest.mark.parametrize("name", ["fgsm", "fgsm-rs", "fgsm-rs-adaptive", "pgd"])
def test_statistics_are_measured_at_an_attack_in_eval_mode(small_net, make_images, name):
    method = atas.methods.create(name, atas.Linf(EPS), EXAMPLES, SHAPE, pad=0)
    method.start_epoch(1, 30)
    x, y, index = make_images(BATCH, SHAPE), torch.arange(BATCH), torch.arange(BATCH)
    batch, model = atas.methods.Batch(x, y, index, View.centre(BATCH, 0)), small_net().train()
    states = [{**part.state_dict()} for part in (model, method)]
    states = [{name: value.clone() for name, value in state.items()} for state in states]
    found = method.batchnorm_inputs(model, batch)
    for part, state in zip((model, method), states, strict=True):
        assert all(torch.equal(value, state[name]) for name, value in part.state_dict().items())
    assert model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(found, method.attack(model.eval(), batch).detach())
    assert not torch.equal(found, x)


def test_which_memory_it_is():
    assert isinstance(make("atas").memory, FullResolution)
    method = make("atas", grid=5)
    assert isinstance(method.memory, LowResolution)
    assert method.memory.delta.dtype == torch.int8
    assert method.memory.nbytes == EXAMPLES * 3 * 5 * 5
    for name in REMEMBERING:
        assert atas.methods.settings(name)["grid"] is None
        assert atas.methods.settings(name)["store"] == "device"


def test_a_view_that_does_not_fit_is_named(small_net, make_images):
    x, index = make_images(BATCH, SHAPE), torch.arange(BATCH)
    shown, view = atas.random_resized_view(x, 9)
    net, grid = small_net(), make("atas", grid=4)
    with pytest.raises(UsageError, match="grid=32"):
        make("atas").perturb(net, shown, index % 4, index, view)
    with pytest.raises(DataError, match=r"images of shape \(3, 12, 12\) do not fit"):
        grid.perturb(net, x, index % 4, index, view)
    with pytest.raises(DataError, match="a view of 4 images does not fit 2 images"):
        grid.perturb(net, shown[:2], index[:2] % 4, index[:2], view)
    free, optimizer = make("free", batch_size=BATCH), torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(DataError, match=r"carries perturbations of one shape along, \(3, 12, 12\)"):
        free.step(net, optimizer, shown, index % 4, index, view)
    with pytest.raises(DataError, match=r"keeps perturbations .* of one shape, \(3, 12, 12\) here"):
        make("fgsm-pgi").step(net, optimizer, shown, index % 4, index, view)
    with pytest.raises(UsageError, match="store must be 'device' or 'host'; got 'disk'"):
        make("atas", store="disk")


# States of other methods

ROUNDING = {torch.float32: 0.0, torch.float16: EPS * 2**-11, torch.int8: EPS / 254}
PAIRS = [(saved, own) for saved in ROUNDING for own in ROUNDING]


@pytest.mark.parametrize("grid", [None, 4])
@pytest.mark.parametrize(("saved", "own"), PAIRS, ids=str)
def test_a_state_is_read_into_every_coding(small_net, make_images, saved, own, grid):
    """Perturbations are the same up to the rounding of both codings; averages and step sizes are equal."""
    method, other = make("atas", dtype=saved, grid=grid), make("atas", dtype=own, grid=grid, seed=1)
    train(method, small_net(), make_images)
    state = method.state_dict()
    kept = {name: tensor.clone() for name, tensor in state.items()}
    other.load_state_dict(state)
    assert all(torch.equal(state[name], tensor) for name, tensor in kept.items())
    assert other.memory.delta.dtype == own
    first, second = (store.decode(store.delta, torch.float32) for store in (method.memory, other.memory))
    assert first.abs().max() > 0.9 * EPS
    assert (first - second).abs().max() <= (0.0 if saved == own else ROUNDING[own] * 1.001)
    assert torch.equal(method.norms.squared_norm, other.norms.squared_norm)
    assert torch.equal(method.step_sizes, other.step_sizes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"memory.delta": lambda t: t.to(torch.int32)}, r"delta is torch.int32 in it; .* int8, float16 or float32"),
        ({"memory.delta": lambda t: t / 0}, r"memory\.delta holds NaN or infinite values in it"),
        ({"norms.average": lambda t: t.long()}, r"average is torch.int64 in it and torch.float32 in this method"),
        ({"epoch": lambda t: t.double()}, r"epoch is torch.float64 in it and torch.int64 in this method"),
        ({"norms.average": lambda t: t[:-1]}, r"norms\.average has the shape \(9,\) in it"),
        ({"norms.average": lambda t: t.tolist()}, r"norms\.average is a list in it, not a tensor"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_state_that_does_not_fit_is_refused(change, said):
    state = make("atas", dtype=torch.float32).state_dict()
    state |= {name: function(state[name]) for name, function in change.items()}
    method = make("atas", seed=1)
    before = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    with pytest.raises(CheckpointError, match=said) as caught:
        method.load_state_dict(state)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(before[name], tensor) for name, tensor in method.state_dict().items())


def test_the_state_of_another_method_is_refused():
    with pytest.raises(CheckpointError, match=r"lacks norms\.average, norms\.step_size; load a state of ATAS"):
        make("atas").load_state_dict(make("atta").state_dict())
    with pytest.raises(CheckpointError, match=r"also holds norms\.average, .*; load a state of ATTA"):
        make("atta").load_state_dict(make("atas").state_dict())
    with pytest.raises(CheckpointError, match="a state is what method"):
        make("atta").load_state_dict([])
    found = make("atas").load_state_dict(make("atta").state_dict(), strict=False)
    assert found.missing_keys == ["norms.average", "norms.step_size"]


def test_parts_of_other_dtypes_are_read_to_rounding():
    method, other = make("atas"), make("atas")
    method.norms.squared_norm.uniform_()
    state = method.state_dict()
    other.load_state_dict(state | {"norms.average": state["norms.average"].double()})
    assert torch.equal(method.norms.squared_norm, other.norms.squared_norm)
