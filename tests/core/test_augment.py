"""Views: what they show, and that it comes back to where it was."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atas.core.augment import View, random_view
from atas.core.crop_shift import ShiftView
from atas.core.resized_crop import BoxView
from atas.core.rng import CounterRNG
from atas.errors import UsageError

PAD, SHAPE = 2, (3, 5, 7)


def draws(count, seed=0, epoch=0):
    return CounterRNG(seed, torch.tensor(epoch), torch.arange(count))


def every_view(pad=PAD):
    """One of each: all offsets, mirrored and not."""
    places = [(t, e, f) for t in range(2 * pad + 1) for e in range(2 * pad + 1) for f in (False, True)]
    top, left, flip = (torch.tensor(values) for values in zip(*places, strict=True))
    return View(top, left, flip, pad)


def slow_window(canvas, top, left, flip, height, width):
    window = torch.zeros(canvas.shape[0], height, width, dtype=canvas.dtype)
    for channel in range(canvas.shape[0]):
        for row in range(height):
            for column in range(width):
                shown = width - 1 - column if flip else column
                window[channel, row, column] = canvas[channel, top + row, left + shown]
    return window


def slow_pad(image, pad):
    channels, height, width = image.shape
    canvas = torch.zeros(channels, height + 2 * pad, width + 2 * pad, dtype=image.dtype)
    canvas[:, pad : pad + height, pad : pad + width] = image
    return canvas


def images(count, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    if dtype == torch.uint8:
        return torch.randint(1, 256, (count, *SHAPE), generator=generator, dtype=torch.uint8)
    return torch.rand(count, *SHAPE, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.uint8])
def test_apply_is_crop_and_flip_of_the_zero_padded_image(dtype):
    view = every_view()
    x = images(len(view), dtype)
    shown = view.apply(x)
    assert shown.dtype == dtype
    for i, (top, left, flip) in enumerate(zip(view.top.tolist(), view.left.tolist(), view.flip.tolist(), strict=True)):
        assert torch.equal(shown[i], slow_window(slow_pad(x[i], PAD), top, left, flip, *SHAPE[1:]))


def test_apply_with_an_index_takes_those_images():
    view, x = every_view(), images(6, torch.uint8)
    index = torch.arange(len(view)) * 5 % 6
    assert torch.equal(view.apply(x, index), view.apply(x[index]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_read_is_the_window_of_a_canvas(dtype):
    view = every_view()
    canvas = (torch.randn(9, SHAPE[0], SHAPE[1] + 2 * PAD, SHAPE[2] + 2 * PAD) * 50).to(dtype)
    index = torch.arange(len(view)) * 4 % 9
    shown = view.read(canvas, index)
    for i, (top, left, flip) in enumerate(zip(view.top.tolist(), view.left.tolist(), view.flip.tolist(), strict=True)):
        assert torch.equal(shown[i], slow_window(canvas[index[i]], top, left, flip, *SHAPE[1:]))


def test_write_puts_windows_back_and_touches_nothing_else():
    view = every_view()
    count = len(view)
    canvas = torch.randn(count + 3, SHAPE[0], SHAPE[1] + 2 * PAD, SHAPE[2] + 2 * PAD)
    before = canvas.clone()
    index = torch.randperm(count + 3)[:count]
    window = torch.randn(count, *SHAPE)
    view.write(canvas, index, window)
    assert torch.equal(view.read(canvas, index), window)
    expected = before.clone()
    for i, (top, left, flip) in enumerate(zip(view.top.tolist(), view.left.tolist(), view.flip.tolist(), strict=True)):
        place = expected[index[i], :, top : top + SHAPE[1], left : left + SHAPE[2]]
        place.copy_(window[i].flip(-1) if flip else window[i])
    assert torch.equal(canvas, expected)
    untouched = torch.ones(count + 3, dtype=torch.bool)
    untouched[index] = False
    assert torch.equal(canvas[untouched], before[untouched])


def test_reading_and_writing_back_changes_nothing():
    view = every_view()
    canvas = torch.randn(len(view), SHAPE[0], SHAPE[1] + 2 * PAD, SHAPE[2] + 2 * PAD)
    before, index = canvas.clone(), torch.arange(len(view))
    view.write(canvas, index, view.read(canvas, index))
    assert torch.equal(canvas, before)


def test_image_and_canvas_are_shown_alike():
    """A perturbation stored on the canvas meets the pixels that it was made for."""
    view = every_view()
    x = images(len(view))
    canvas = torch.stack([slow_pad(image, PAD) for image in x])
    assert torch.equal(view.apply(x), view.read(canvas, torch.arange(len(view))))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    pad=st.integers(0, 4),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    channels=st.integers(1, 4),
    seed=st.integers(0, 2**40),
)
def test_any_size_comes_back(pad, height, width, channels, seed):
    view = View.draw(draws(6, seed), pad)
    canvas = torch.zeros(6, channels, height + 2 * pad, width + 2 * pad)
    window = torch.rand(6, channels, height, width) + 1
    view.write(canvas, torch.arange(6), window)
    assert torch.equal(view.read(canvas, torch.arange(6)), window)
    assert int((canvas != 0).sum()) == window.numel()
    x = torch.rand(6, channels, height, width)
    shown = view.apply(x)
    for i in range(6):
        wanted = slow_window(
            slow_pad(x[i], pad), int(view.top[i]), int(view.left[i]), bool(view.flip[i]), height, width
        )
        assert torch.equal(shown[i], wanted)


@pytest.mark.parametrize("pad", [0, 1, 4])
def test_the_centre_shows_the_image_itself(pad):
    x = images(4)
    view = View.centre(4, pad)
    assert len(view) == 4
    assert torch.equal(view.apply(x), x)


def test_draws_do_not_depend_on_the_batch():
    whole = View.draw(draws(50, seed=3, epoch=2), pad=4)
    index = torch.tensor([41, 7, 8])
    part = View.draw(CounterRNG(3, torch.tensor(2), index), pad=4)
    for name in ("top", "left", "flip"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[index])


@pytest.mark.parametrize("source", ["counter", "generator"])
def test_offsets_and_flips_are_uniform_and_independent(source):
    count = 20000
    if source == "counter":
        view = View.draw(draws(count), pad=4)
    else:
        _, view = random_view(torch.zeros(count, 1, 1, 1), pad=4, generator=torch.Generator().manual_seed(0))
    for offset in (view.top, view.left):
        assert offset.dtype == torch.int64
        assert (int(offset.min()), int(offset.max())) == (0, 8)
        share = torch.bincount(offset, minlength=9) / count
        assert (share - 1 / 9).abs().max() < 4 * (1 / 9 * 8 / 9 / count) ** 0.5
    assert view.flip.dtype == torch.bool
    assert abs(float(view.flip.float().mean()) - 0.5) < 4 * 0.5 / count**0.5
    together = torch.corrcoef(torch.stack([view.top.float(), view.left.float(), view.flip.float()])) - torch.eye(3)
    assert together.abs().max() < 4 / count**0.5


def test_views_change_from_epoch_to_epoch_and_with_the_seed():
    first = View.draw(draws(1000, seed=0, epoch=0), pad=4)
    for other in (View.draw(draws(1000, seed=0, epoch=1), pad=4), View.draw(draws(1000, seed=1, epoch=0), pad=4)):
        for name in ("top", "left", "flip"):
            a, b = getattr(first, name).float(), getattr(other, name).float()
            assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.13


def test_flips_can_be_switched_off():
    assert not View.draw(draws(100), pad=4, flip=False).flip.any()
    assert not random_view(torch.zeros(100, 1, 2, 2), flip=False)[1].flip.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_random_view_shows_what_its_view_says(dtype):
    x = images(8, dtype)
    shown, view = random_view(x, pad=PAD)
    assert view.pad == PAD
    assert len(view) == 8
    assert shown.dtype == dtype
    assert torch.equal(shown, view.apply(x))


def test_random_view_pads_by_four_unless_told():
    assert random_view(torch.zeros(2, 3, 8, 8))[1].pad == 4


def test_random_view_with_a_generator_is_reproducible():
    x = images(20)
    (first, _), (second, _), (third, _) = (
        random_view(x, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
    state = torch.random.get_rng_state()
    random_view(x, generator=torch.Generator())
    assert torch.equal(state, torch.random.get_rng_state())


def test_random_view_names_what_is_wrong():
    with pytest.raises(UsageError, match=r"batch of images \(N, C, H, W\); got shape \(3, 8, 8\)"):
        random_view(torch.zeros(3, 8, 8))
    with pytest.raises(UsageError, match="pad must be 0 to 10,000 pixels; got -1"):
        random_view(torch.zeros(1, 3, 8, 8), pad=-1)


@pytest.mark.parametrize(
    "draw",
    [
        lambda rng: View.draw(rng, 4, "alternate"),
        lambda rng: ShiftView.draw(rng, (32, 32), 10, "alternate"),
        lambda rng: BoxView.crop(rng, 24, 32, "alternate"),
        lambda rng: BoxView.resized(rng, 24, (32, 32), flip="alternate"),
    ],
)
def test_alternating_flips_show_both_sides_in_two_epochs(draw):
    index = torch.arange(2000)
    flips = [draw(CounterRNG(3, torch.tensor(epoch), index)).flip for epoch in range(6)]
    for first, second in zip(flips[::2], flips[1::2], strict=True):
        assert torch.equal(first, ~second)
    for early, late in zip(flips[:4:2], flips[2::2], strict=True):
        assert 0.45 < float((early == late).float().mean()) < 0.55, "every two epochs have draws of their own"
        assert 0.45 < float(early.float().mean()) < 0.55
