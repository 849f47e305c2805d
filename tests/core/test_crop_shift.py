"""CropShift and erasing: what they show, that it comes back to where it was, and how they are drawn."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import atas
from atas.core.augment import View
from atas.core.crop_shift import ShiftView, random_shift_view
from atas.core.dispatch import use_fast_ops
from atas.core.erasing import ErasedView, random_erasing
from atas.core.perturbations import FullResolution, LowResolution
from atas.core.rng import CounterRNG
from atas.errors import DataError, UsageError

SIZE = (7, 9)


def rng(count=40, seed=0, epoch=0, index=None):
    return CounterRNG(seed, torch.tensor(epoch), torch.arange(count) if index is None else index)


def shifts(count=40, shift=4, **where):
    return ShiftView.draw(rng(count, **where), SIZE, shift)


def erased(view, count=40, probability=0.7, **where):
    return ErasedView.draw(rng(count, **where), view, SIZE, probability, (0.1, 0.4))


VIEWS = {
    "shift": lambda: shifts(),
    "erased shift": lambda: erased(shifts()),
    "erased pad": lambda: erased(View.draw(rng(), 2)),
    "erased nothing": lambda: erased(shifts(), probability=0.0),
}
every_view = pytest.mark.parametrize("view", [make() for make in VIEWS.values()], ids=VIEWS)


def images(count=40, channels=3, dtype=torch.float32, pad=0):
    """Images without a zero, so that a zero is no pixel of theirs."""
    shape = (count, channels, SIZE[0] + 2 * pad, SIZE[1] + 2 * pad)
    values = torch.randint(1, 100, shape, generator=torch.Generator().manual_seed(0))
    return values.to(dtype)


def slow_shift(image, view, row):
    """Crop the box, paste it into zeros, mirror: with slices, for one example."""
    top, left, height, width = (int(getattr(view, name)[row]) for name in ("top", "left", "height", "width"))
    source_top, source_left = int(view.source_top[row]), int(view.source_left[row])
    shown = torch.zeros_like(image)
    box = image[:, source_top : source_top + height, source_left : source_left + width]
    shown[:, top : top + height, left : left + width] = box
    return shown.flip(-1) if view.flip[row] else shown


def slow_view(image, view, row):
    if isinstance(view, ErasedView):
        inner = view.view
        shown = slow_shift(image, inner, row) if isinstance(inner, ShiftView) else pad_crop(image, inner, row)
        top, left, height, width = (int(getattr(view, name)[row]) for name in ("top", "left", "height", "width"))
        shown[:, top : top + height, left : left + width] = 0
        return shown
    return slow_shift(image, view, row)


def pad_crop(image, view, row):
    canvas = torch.nn.functional.pad(image, [view.pad] * 4)
    top, left = int(view.top[row]), int(view.left[row])
    shown = canvas[:, top : top + SIZE[0], left : left + SIZE[1]].clone()
    return shown.flip(-1) if view.flip[row] else shown


@every_view
@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.int8])
def test_what_a_view_shows(view, dtype):
    x = images(dtype=dtype)
    shown = view.apply(x)
    assert shown.dtype == dtype
    for row in range(len(view)):
        assert torch.equal(shown[row], slow_view(x[row], view, row)), row
    index = torch.arange(len(view)).flip(0)
    assert torch.equal(view.apply(x, index), view.apply(x[index]))


@every_view
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_what_is_written_is_read_and_nothing_else_changes(view, dtype):
    """Into shuffled rows of a larger canvas with padding; every pixel is written where it comes from."""
    pad = 2
    index = torch.randperm(50, generator=torch.Generator().manual_seed(1))[: len(view)]
    canvas = images(50, dtype=dtype, pad=pad)
    before, window = canvas.clone(), -images(len(view), dtype=dtype)
    shown = view.read(canvas, index)
    view.write(canvas, index, window)
    visible = shown != 0
    assert torch.equal(view.read(canvas, index), torch.where(visible, window, 0))
    changed = (canvas != before).sum((1, 2, 3))
    assert torch.equal(changed[index], visible.sum((1, 2, 3)))
    untouched = torch.ones(50, dtype=torch.bool)
    untouched[index] = False
    assert not changed[untouched].any()
    view.write(canvas, index, shown)
    assert torch.equal(canvas, before)


@every_view
def test_perturbations_follow_the_pixels_of_their_image(view):
    """The stored perturbation of a pixel is shown where the pixel is."""
    x = images()
    if not isinstance(getattr(view, "view", None), View):
        assert torch.equal(view.read(torch.nn.functional.pad(x, [3] * 4), torch.arange(len(view))), view.apply(x))
    assert torch.equal(view.read(torch.nn.functional.pad(x, [2] * 4), torch.arange(len(view))), view.apply(x))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    shift=st.integers(0, 4),
    height=st.integers(5, 9),
    width=st.integers(5, 9),
    pad=st.integers(0, 3),
    seed=st.integers(-(2**40), 2**40),
)
def test_any_size_comes_back(shift, height, width, pad, seed):
    view = ShiftView.draw(rng(6, seed), (height, width), shift)
    canvas = torch.zeros(6, 2, height + 2 * pad, width + 2 * pad)
    view.write(canvas, torch.arange(6), torch.rand(6, 2, height, width) + 1)
    assert torch.equal((canvas != 0).sum((1, 2, 3)), 2 * view.height * view.width)
    assert torch.equal((view.read(canvas, torch.arange(6)) != 0).sum((1, 2, 3)), 2 * view.height * view.width)


# How they are drawn


def fields(view):
    return {name: value for name, value in vars(view).items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("draw", [shifts, lambda **how: erased(shifts(**how), **how)], ids=["shift", "erased"])
def test_draws_depend_on_seed_epoch_and_example_alone(draw):
    whole, index = draw(count=60, seed=3, epoch=2), torch.tensor([41, 7, 8])
    part = draw(count=3, seed=3, epoch=2, index=index)
    for name, value in fields(part).items():
        assert torch.equal(value, fields(whole)[name][index]), name
    for other in ({"seed": 4, "epoch": 2}, {"seed": 3, "epoch": 3}):
        assert any(
            not torch.equal(value, fields(whole)[name]) for name, value in fields(draw(count=60, **other)).items()
        )


@pytest.mark.slow
@pytest.mark.parametrize("source", ["counter", "generator"])
def test_boxes_are_those_of_cropshift(source):
    """The pixels that are cut off in all are uniform on 0..shift, and so is their part in the columns."""
    count, shift, side = 40000, 10, 32
    if source == "counter":
        view = ShiftView.draw(rng(count), (side, side), shift)
    else:
        generator = torch.Generator().manual_seed(0)
        _, view = random_shift_view(torch.zeros(count, 1, side, side), shift, generator=generator)
    lost_rows, lost_columns = side - view.height, side - view.width
    lost = lost_rows + lost_columns
    uniform = torch.bincount(lost, minlength=shift + 1) / count
    assert (uniform - 1 / 11).abs().max() < 4 * (1 / 11 * 10 / 11 / count) ** 0.5
    for total in (1, 5, 10):
        chosen = lost == total
        share = torch.bincount(lost_columns[chosen], minlength=total + 1) / chosen.sum()
        assert (share - 1 / (total + 1)).abs().max() < 4 * (0.25 / int(chosen.sum())) ** 0.5
    for room, places in ((lost_rows, ("source_top", "top")), (lost_columns, ("source_left", "left"))):
        for place in places:
            start = getattr(view, place)
            assert (start >= 0).all()
            assert (start <= room).all()
            starts = torch.bincount(start[room == 4], minlength=5) / int((room == 4).sum())
            assert (starts - 0.2).abs().max() < 4 * (0.16 / int((room == 4).sum())) ** 0.5
    apart = torch.stack([(getattr(view, name) / (room + 1)) for name, room in
                         (("source_top", lost_rows), ("top", lost_rows), ("source_left", lost_columns),
                          ("left", lost_columns))])[:, lost_rows.minimum(lost_columns) > 2]  # fmt: skip
    assert (torch.corrcoef(apart) - torch.eye(4)).abs().max() < 5 / apart.shape[1] ** 0.5
    assert abs(float(view.flip.float().mean()) - 0.5) < 4 * 0.5 / count**0.5


@pytest.mark.slow
@pytest.mark.parametrize("source", ["counter", "generator"])
def test_rectangles_are_those_of_random_erasing(source):
    count, size, area = 20000, (32, 32), (0.02, 0.33)
    x = torch.ones(count, 1, *size)
    if source == "counter":
        view = ErasedView.draw(rng(count), View.draw(rng(count), 0), size, 0.5, area)
        shown = view.apply(x)
    else:
        shown, view = random_erasing(
            *atas.random_view(x, 0), 0.5, area=area, generator=torch.Generator().manual_seed(0)
        )
    there = view.height > 0
    assert abs(float(there.float().mean()) - 0.5) < 4 * 0.5 / count**0.5
    height, width = view.height[there].double(), view.width[there].double()
    share = height * width / 1024
    assert torch.equal(shown.sum((1, 2, 3)), 1024 - (view.height * view.width).float())
    assert 0.01 < share.min() < 0.03
    assert 0.32 < share.max() < 0.36
    assert 0.15 < share.mean() < 0.185  # large, slender rectangles do not fit and are drawn again
    assert ((height < 32) & (width < 32)).all()
    assert abs(float((height / width).log().mean())) < 0.03
    for start, side in ((view.top[there], height), (view.left[there], width)):
        assert (start >= 0).all()
        assert (start + side <= 32).all()
        assert abs(float(((start + 0.5) / (33 - side)).mean()) - 0.5) < 0.01


def test_large_rectangles_fit_the_image():
    """They are drawn again until they do."""
    count = 300
    view = ErasedView.draw(rng(count), shifts(count), SIZE, 1.0, (0.5, 0.95))
    assert (view.height > 0).float().mean() > 0.7
    for start, side, length in ((view.top, view.height, SIZE[0]), (view.left, view.width, SIZE[1])):
        assert (side < length).all()
        assert (start + side <= length).all()
    area = (view.height * view.width)[view.height > 0]
    assert (area >= 0.4 * SIZE[0] * SIZE[1]).all()


def test_golden_values():
    """Streams are frozen: these numbers were recorded once."""
    view = ShiftView.draw(CounterRNG(7, torch.tensor(2), torch.tensor([0, 1, 12345])), (32, 32), 10)
    rectangle = ErasedView.draw(CounterRNG(7, torch.tensor(2), torch.tensor([0, 1, 12345])), view, (32, 32), 0.9)
    assert {name: value.tolist() for name, value in fields(view).items()} == GOLDEN_SHIFT
    assert {name: value.tolist() for name, value in fields(rectangle).items()} == GOLDEN_ERASED


GOLDEN_SHIFT = {
    "source_top": [1, 0, 0],
    "source_left": [0, 3, 1],
    "top": [0, 0, 4],
    "left": [1, 0, 2],
    "height": [31, 32, 26],
    "width": [30, 29, 28],
    "flip": [True, True, True],
}
GOLDEN_ERASED = {"top": [14, 19, 14], "left": [7, 1, 7], "height": [12, 8, 16], "width": [23, 22, 15]}


def test_views_are_plain_from_an_epoch_on():
    for epoch, plain in ((4, False), (5, True), (6, True)):
        view = ShiftView.draw(rng(epoch=epoch), SIZE, 4, until=5)
        rectangles = ErasedView.draw(rng(epoch=epoch), view, SIZE, 0.7, until=5)
        x = images()
        mirrored = torch.where(view.flip[:, None, None, None], x.flip(-1), x)
        assert torch.equal(rectangles.apply(x), mirrored) == plain
        assert torch.equal(view.apply(x), mirrored) == plain


def test_switched_off():
    assert not ShiftView.draw(rng(), SIZE, 4, flip=False).flip.any()
    x = images()
    shown, view = random_shift_view(x, 0, flip=False)
    assert torch.equal(shown, x)
    assert torch.equal(random_erasing(shown, view, 0.0)[0], x)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it itself
def test_compiled_draws_are_the_plain_ones():
    torch._dynamo.reset()
    plain = ErasedView.draw(rng(), ShiftView.draw(rng(), SIZE, 4), SIZE, 0.7)
    with use_fast_ops("aot_eager"):
        fast = ErasedView.draw(rng(), ShiftView.draw(rng(), SIZE, 4), SIZE, 0.7)
    for one, other in ((plain, fast), (plain.view, fast.view)):
        for name, value in fields(one).items():
            assert torch.equal(value, fields(other)[name]), name


# Memory and methods


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32])
@every_view
def test_a_memory_follows(view, dtype):
    threat, pad = atas.Linf(0.1), 2
    memory = FullResolution(threat, 50, (3, *SIZE), pad=pad, dtype=dtype)
    memory.reset(0, 0)
    before, index = memory.delta.clone(), torch.arange(len(view))
    perturbation = threat.sample(rng(len(view), seed=9), (3, *SIZE))
    visible = view.read(torch.ones_like(memory.delta), index) != 0
    memory.store(index, view, perturbation)
    found = memory.load(index, view, torch.float32)
    torch.testing.assert_close(found, torch.where(visible, perturbation, 0), atol=0.1 / 250, rtol=0)
    assert torch.equal((memory.delta != before).sum((1, 2, 3))[len(view) :], torch.zeros(50 - len(view)).long())
    kept = memory.delta == before
    assert kept[: len(view)].sum() >= kept[: len(view)].numel() - int(visible.sum())


def test_in_a_loop_of_one_s_own(small_net):
    shape = (3, 8, 10)
    method = atas.ATAS(atas.Linf(8 / 255), examples=6, shape=shape)
    method.start_epoch(6, 30)
    model, x, y = small_net().train(), torch.rand(6, *shape), torch.tensor([0, 1, 2, 3, 0, 1])
    before = method.memory.delta.clone()
    shown, view = random_erasing(*random_shift_view(x, 3), 1.0)
    x_adv = method.perturb(model, shown, y, torch.arange(6), view)
    assert float((x_adv - shown).abs().max()) <= 8 / 255 + 1e-6
    visible = view.read(torch.ones_like(before), torch.arange(6)) != 0
    changed = (method.memory.delta != before).sum((1, 2, 3))
    assert (changed <= visible.sum((1, 2, 3))).all()
    assert (changed > 0).all()


def test_a_view_of_other_images_is_refused(small_net):
    method = atas.ATAS(atas.Linf(8 / 255), examples=6, shape=(3, 8, 10))
    method.start_epoch(6, 30)
    x, y = torch.rand(6, 3, 8, 10), torch.zeros(6).long()
    for view in (random_shift_view(x[:5], 2)[1], random_shift_view(x[..., :9], 2)[1]):
        with pytest.raises(DataError, match="draw it from this batch"):
            method.perturb(small_net(), x, y, torch.arange(6), view)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda: random_shift_view(torch.zeros(1, 3, 8, 8), 8), "below the 8 pixels of the shorter side; got 8"),
        (lambda: random_shift_view(torch.zeros(3, 8, 8)), r"batch of images \(N, C, H, W\)"),
        (lambda: random_erasing(*random_shift_view(torch.zeros(2, 3, 8, 8), 2), 1.5), "probability=1.5"),
        (lambda: random_erasing(torch.zeros(2, 3, 8, 8), None), "that random_view or random_shift_view returned"),
        (
            lambda: LowResolution(atas.Linf(0.1), 40, (3, 8, 8), grid=4, dtype=torch.int8).load(
                torch.arange(40), shifts(), torch.float32
            ),
            "create the method without grid",
        ),
    ],
)
def test_wrong_use_is_said(act, words):
    with pytest.raises(UsageError, match=words):
        act()
