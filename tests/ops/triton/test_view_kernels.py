"""Kernels that draw views and show images through them, against the plain versions."""

from __future__ import annotations

import pytest
import torch
from helpers.kernels import DEVICE, VIEWS, draw_view, run_kernel

from atas.core import augment, crop_shift, erasing
from atas.core.augment import View
from atas.core.rng import CounterRNG
from atas.data import loader

pytestmark = pytest.mark.usefixtures("division_as_on_a_gpu")


@pytest.mark.parametrize("seed", [0, 1, 12345678901234567])
@pytest.mark.parametrize("pad", [0, 1, 4])
@pytest.mark.parametrize("count", [1, 5, 200])
@pytest.mark.parametrize("flip", [True, False, "alternate"])
def test_views_are_drawn_to_the_bit(seed, pad, count, flip):
    for epoch in (-1, 0, 29):
        assert_same_draws(augment.sample_view, seed, epoch, count, pad, flip)


@pytest.mark.parametrize("count", [1, 200])
@pytest.mark.parametrize("flip", [True, False, "alternate"])
@pytest.mark.parametrize(("seed", "size", "shift"), [(0, (32, 32), 10), (12345678901234567, (5, 7), 4), (0, (8, 6), 0)])
def test_boxes_are_drawn_to_the_bit(seed, size, shift, count, flip):
    for epoch, until in ((0, None), (29, None), (29, 30), (29, 29)):
        assert_same_draws(crop_shift.sample_shift, seed, epoch, count, size, shift, flip, until)


@pytest.mark.parametrize(
    ("seed", "size", "probability", "area"),
    [
        (0, (32, 32), 0.5, (0.02, 0.33)),
        (12345678901234567, (5, 7), 1, (0.3, 1)),
        (0, (1, 1), 1, (0.02, 0.33)),
        (0, (8, 8), 0.0, (0.1, 0.1)),
    ],
)
def test_rectangles_are_drawn_to_the_bit(seed, size, probability, area):
    for count, epoch, until in ((200, 0, None), (1, 29, 30), (5, 29, 29)):
        assert_same_draws(erasing.sample_erasure, seed, epoch, count, size, probability, area, until)


def assert_same_draws(function, seed, epoch, count, *settings):
    index = torch.randperm(1000, device=DEVICE)[:count] * 2**24
    arguments = seed, torch.tensor(epoch, device=DEVICE), index, *settings
    for found, expected in zip(run_kernel(function, *arguments), function(*arguments), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 5, 7), (3, 32, 32)])
@pytest.mark.parametrize("kind", ["crop", *VIEWS])
def test_images_are_shown_exactly(shape, kind):
    images = torch.randint(256, (20, *shape), dtype=torch.uint8, device=DEVICE)
    index = torch.tensor([3, 19, 3, 0, 7], device=DEVICE)
    for epoch in range(4):
        view = draw_view(kind, CounterRNG(0, torch.tensor(epoch, device=DEVICE), index), shape[1:], pad=4)
        shown = run_kernel(loader.gather_views, images, index, view)
        assert torch.equal(shown, loader.gather_views(images, index, view))


def test_images_are_shown_at_every_offset():
    pad = 2
    images = torch.randint(256, (60, 1, 6, 5), dtype=torch.uint8, device=DEVICE)
    offset, offsets = torch.arange(2 * (2 * pad + 1) ** 2, device=DEVICE), 2 * pad + 1
    view = View(offset // 2 % offsets, offset // 2 // offsets, offset % 2 == 0, pad)
    assert torch.equal(run_kernel(loader.gather_views, images, offset, view), loader.gather_views(images, offset, view))


def test_every_level_is_shown_exactly():
    images = torch.arange(256, dtype=torch.uint8, device=DEVICE).reshape(1, 1, 16, 16)
    arguments = images, torch.zeros(1, dtype=torch.long, device=DEVICE), View.centre(1, 0, images.device)
    assert torch.equal(run_kernel(loader.gather_views, *arguments), loader.gather_views(*arguments))
