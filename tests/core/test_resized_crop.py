"""Boxes: what they show, against pixel-by-pixel code in float64, and how grids take up what was shown."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from atas.core.augment import View
from atas.core.resized_crop import BoxView, random_crop_view, random_resized_view, to_box_view
from atas.core.rng import CounterRNG, Stream
from atas.data.loader import DeviceLoader
from atas.errors import UsageError


def draws(count, seed=0, epoch=0):
    return CounterRNG(seed, torch.tensor(epoch), torch.arange(count))


def boxes(kind, count, seed=0, size=(6, 7)):
    """Windows of one of the kinds that there are, at a size that need not be square."""
    if kind == "crop":
        view = BoxView.crop(draws(count, seed), 7, 8)
    elif kind == "resized":
        view = BoxView.resized(draws(count, seed), 7, (18, 25))
    else:
        view = to_box_view(View.draw(draws(count, seed), pad=2), size)
    return BoxView(view.top, view.left, view.height, view.width, view.flip, size)


def places(view, i):
    """Where the shown rows and columns of one box lie, in shares of the stored image."""
    (high, wide), flip = view.size, bool(view.flip[i])
    top, left, height, width = (float(value[i]) for value in (view.top, view.left, view.height, view.width))
    rows = [top + (row + 0.5) / high * height for row in range(high)]
    columns = [left + ((wide - 1 - column if flip else column) + 0.5) / wide * width for column in range(wide)]
    return rows, columns


def slow_sample(line, place, step):
    """One number of a line of samples: a triangle around the place, as wide as the step where that is above one."""
    at = min(max(place * len(line) - 0.5, -0.5), len(line) - 0.5)
    weights = [max(0.0, 1 - abs(k - at) / max(1.0, step)) for k in range(len(line))]
    return sum(w * v for w, v in zip(weights, line, strict=True)) / sum(weights)


def slow_show(image, view, i, antialias):
    rows, columns = places(view, i)
    high, wide = image.shape[-2:]
    down = float(view.height[i]) * high / view.size[0] if antialias else 1.0
    across = float(view.width[i]) * wide / view.size[1] if antialias else 1.0
    shown = torch.zeros(image.shape[0], *view.size, dtype=torch.float64)
    for channel in range(image.shape[0]):
        lines = [[slow_sample(line, column, across) for column in columns] for line in image[channel].tolist()]
        for n, row in enumerate(rows):
            for m in range(len(columns)):
                shown[channel, n, m] = slow_sample([line[m] for line in lines], row, down)
    return shown


def slow_update(grid, view, i, window, rounds=4):
    """Every cell takes the mean of what the pixels in it lack, a few times over."""
    rows, columns = places(view, i)
    channels, high, wide = grid.shape
    grid = grid.clone()
    for _ in range(rounds):
        lack = window - slow_show(grid, view, i, antialias=False)
        for channel in range(channels):
            found = {}
            for n, row in enumerate(rows):
                for m, column in enumerate(columns):
                    cell = math.floor(row * high + 1e-9), math.floor(column * wide + 1e-9)
                    found.setdefault(cell, []).append(float(lack[channel, n, m]))
            for (row, column), values in found.items():
                if 0 <= row < high and 0 <= column < wide:
                    grid[channel, row, column] += sum(values) / len(values)
    return grid


# What is shown


@pytest.mark.parametrize("size", [(4, 3), (6, 7), (20, 11)])
@pytest.mark.parametrize("kind", ["crop", "resized"])
def test_apply_is_the_resampled_box(kind, size):
    view = boxes(kind, 4, size=size)
    x = torch.rand(4, 2, 10, 13, dtype=torch.float64)
    shown = view.apply(x)
    for i in range(4):
        torch.testing.assert_close(shown[i], slow_show(x[i], view, i, antialias=True), atol=1e-12, rtol=0)


def test_apply_takes_stored_images_by_index():
    view, images = boxes("resized", 5), torch.randint(256, (9, 3, 10, 13), dtype=torch.uint8)
    index = torch.tensor([8, 0, 3, 3, 1])
    shown = view.apply(images, index)
    assert shown.dtype == torch.float32
    torch.testing.assert_close(shown, view.apply(images[index].double()).float(), atol=1e-3, rtol=1e-6)


@pytest.mark.parametrize("size", [(5, 9), (16, 12), (40, 50)])
def test_the_whole_image_is_resized_as_torch_does_it(size):
    x = torch.rand(2, 3, 16, 24, dtype=torch.float64)
    one = torch.ones(2, dtype=torch.float64)
    view = BoxView(one - 1, one - 1, one, one, torch.zeros(2, dtype=torch.bool), size)
    expected = F.interpolate(x, size, mode="bilinear", antialias=True)
    torch.testing.assert_close(view.apply(x), expected, atol=1e-12, rtol=0)


def test_a_crop_of_an_image_of_that_size_is_its_pixels():
    x = torch.rand(6, 3, 256, 256)
    view = BoxView.crop(draws(6), 224, 256)
    shown = view.apply(x)
    for i in range(6):
        top, left = round(float(view.top[i]) * 256), round(float(view.left[i]) * 256)
        pixels = x[i, :, top : top + 224, left : left + 224]
        assert torch.equal(shown[i], pixels.flip(-1) if view.flip[i] else pixels)
    assert 0 < int(view.flip.sum()) < 6


def test_a_crop_is_that_of_the_resized_image():
    """Whatever shape the image has, as in the authors' code: resize to a square, crop, flip."""
    x = torch.rand(3, 3, 40, 72, dtype=torch.float64)
    view = BoxView.crop(draws(3, seed=5), 28, 32)
    square = F.interpolate(x, (32, 32), mode="bilinear", antialias=True)
    torch.testing.assert_close(view.apply(x), view.apply(square), atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["crop", "resized", "padded"])
def test_reading_a_grid_is_bilinear(kind):
    view = boxes(kind, 4, seed=1)
    grids = torch.randn(4, 2, 5, 4, dtype=torch.float64)
    shown = view.read(grids)
    for i in range(4):
        torch.testing.assert_close(shown[i], slow_show(grids[i], view, i, antialias=False), atol=1e-12, rtol=0)


def test_a_fine_grid_through_a_padded_view_is_its_pixels():
    view = View.draw(draws(8), pad=2)
    x = torch.rand(8, 3, 6, 7)
    shown, pixels = to_box_view(view, (6, 7)).read(x), view.apply(x + 1)
    torch.testing.assert_close(shown[pixels > 0], pixels[pixels > 0] - 1)


# The way back


@pytest.mark.parametrize("kind", ["crop", "resized", "padded"])
@pytest.mark.parametrize("size", [(3, 4), (6, 7), (15, 14)])
def test_a_grid_takes_up_a_window(kind, size):
    view = boxes(kind, 3, seed=2, size=size)
    grids, window = torch.randn(3, 2, 5, 4, dtype=torch.float64), torch.randn(3, 2, *size, dtype=torch.float64)
    found = view.update(grids, window)
    for i in range(3):
        torch.testing.assert_close(found[i], slow_update(grids[i], view, i, window[i]), atol=1e-11, rtol=0)


@pytest.mark.parametrize("kind", ["crop", "resized", "padded"])
def test_storing_what_was_loaded_changes_nothing(kind):
    view, grids = boxes(kind, 20, seed=3), torch.randn(20, 2, 5, 4, dtype=torch.float64)
    torch.testing.assert_close(view.update(grids, view.read(grids)), grids, atol=1e-13, rtol=0)


def test_the_place_of_a_perturbation_stays_that_of_the_image():
    """What is written through one box, mirrored, shows through another where the image shows the same pixels."""
    one = torch.ones(1, dtype=torch.float64)
    right = BoxView(0 * one, one / 2, one, one / 2, torch.tensor([True]), (32, 16))
    whole = BoxView(0 * one, 0 * one, one, one, torch.tensor([False]), (32, 32))
    x = torch.rand(1, 1, 8, 8, dtype=torch.float64)
    shown = whole.read(right.update(torch.zeros_like(x), right.read(x)))
    torch.testing.assert_close(shown[..., 20:], whole.read(x)[..., 20:], atol=0.06, rtol=0)
    assert not shown[..., :14].any()


# Which boxes are drawn


def slow_resized(area, ratio, top, left, frame, scale, bounds):
    """torchvision's RandomResizedCrop, one image at a time."""
    tall, wide = frame
    for a, r in zip(area, ratio, strict=True):
        target = tall * wide * (scale[0] + (scale[1] - scale[0]) * a)
        aspect = math.exp(math.log(bounds[0]) + (math.log(bounds[1]) - math.log(bounds[0])) * r)
        width, height = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < width <= wide and 0 < height <= tall:
            return math.floor(top * (tall - height + 1)), math.floor(left * (wide - width + 1)), height, width
    height, width = tall, wide
    if wide / tall < bounds[0]:
        height = round(wide / bounds[0])
    elif wide / tall > bounds[1]:
        width = round(tall * bounds[1])
    return (tall - height) // 2, (wide - width) // 2, height, width


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    tall=st.integers(4, 300),
    wide=st.integers(4, 300),
    low=st.floats(0.05, 0.9),
    seed=st.integers(0, 2**40),
    bounds=st.sampled_from([(3 / 4, 4 / 3), (1.0, 1.0), (0.5, 0.9)]),
)
def test_resized_boxes_are_those_of_random_resized_crop(tall, wide, low, seed, bounds):
    draw = draws(12, seed, epoch=3)
    view = BoxView.resized(draw, 8, (tall, wide), (low, 1.0), bounds)
    drawn = [draw.uniform(p, (10,)).double().tolist() for p in (Stream.AREA, Stream.RATIO)]
    drawn += [draw.uniform(p).tolist() for p in (Stream.TOP, Stream.LEFT)]
    found = torch.stack([view.top * tall, view.left * wide, view.height * tall, view.width * wide], 1).round()
    for i, numbers in enumerate(zip(*drawn, strict=True)):
        assert tuple(found[i].int().tolist()) == slow_resized(*numbers, (tall, wide), (low, 1.0), bounds)


def test_where_nothing_fits_the_middle_is_shown():
    view = BoxView.resized(draws(5), 8, (10, 200), (0.9, 1.0))
    assert torch.equal(view.height, torch.ones(5, dtype=torch.float64))
    assert (view.width * 200).round().tolist() == [13] * 5
    assert (view.left * 200).round().tolist() == [93] * 5


def test_crops_lie_anywhere_with_equal_chance():
    view = BoxView.crop(draws(20000), 224, 256)
    for offset in (view.top, view.left):
        share = torch.bincount((offset * 256).long(), minlength=33) / 20000
        assert len(share) == 33
        assert (share - 1 / 33).abs().max() < 4.5 * (1 / 33 / 20000) ** 0.5
    assert abs(float(view.flip.float().mean()) - 0.5) < 4 * 0.5 / 20000**0.5
    assert not BoxView.crop(draws(20), 224, 256, flip=False).flip.any()


@pytest.mark.parametrize("kind", ["crop", "resized"])
def test_draws_depend_on_seed_epoch_and_example_alone(kind):
    def draw(index, seed=1, epoch=2):
        numbers = CounterRNG(seed, torch.tensor(epoch), torch.tensor(index))
        view = BoxView.crop(numbers, 20, 64) if kind == "crop" else BoxView.resized(numbers, 20, (64, 80))
        return torch.stack([view.top, view.left, view.height, view.width, view.flip.double()], 1)

    whole = draw(list(range(30)))
    assert torch.equal(draw([17, 4]), whole[[17, 4]])
    assert not torch.equal(draw(list(range(30)), seed=2), whole)
    assert not torch.equal(draw(list(range(30)), epoch=3), whole)


def test_the_resident_loader_shows_boxes():
    images = torch.randint(256, (10, 3, 16, 16), dtype=torch.uint8)
    batches = DeviceLoader(
        images, torch.zeros(10, dtype=torch.long), batch_size=4, pad=0, flip=True, seed=3, device=torch.device("cpu"),
        views=lambda draw: BoxView.crop(draw, 12, 16),
    )  # fmt: skip
    index, epoch = torch.tensor([7, 1, 2]), torch.tensor(4)
    batch = batches.take(index, epoch)
    expected = BoxView.crop(CounterRNG(3, epoch, index), 12, 16)
    assert torch.equal(batch.view.top, expected.top)
    assert torch.equal(batch.x, expected.apply(images, index) / 255)


# In your own loop


@pytest.mark.parametrize("show", [random_crop_view, random_resized_view])
def test_random_views_come_from_the_generator(show):
    x = torch.rand(8, 3, 40, 40)
    options = {"size": 28, "of": 32} if show is random_crop_view else {"size": 28}
    (first, view), (second, _), (third, _) = (
        show(x, generator=torch.Generator().manual_seed(seed), **options) for seed in (1, 1, 2)
    )
    assert first.shape == (8, 3, 28, 28)
    assert torch.equal(first, view.apply(x))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: random_crop_view(torch.zeros(3, 8, 8)), r"batch of images \(N, C, H, W\); got shape \(3, 8, 8\)"),
        (lambda: random_crop_view(torch.zeros(1, 3, 8, 8), 9, of=8), "9 pixels does not fit an image of 8"),
        (lambda: random_resized_view(torch.zeros(1, 3, 8, 8), 0), "at least 1 pixel; got 0"),
        (lambda: random_resized_view(torch.zeros(1, 3, 8, 8), scale=(0.5, 2.0)), r"scale=\(0.5, 2.0\)"),
        (lambda: random_resized_view(torch.zeros(1, 3, 8, 8), ratio=(2.0, 1.0)), r"ratio=\(2.0, 1.0\)"),
    ],
)
def test_random_views_name_what_is_wrong(call, match):
    with pytest.raises(UsageError, match=match):
        call()
