"""Settings chosen from numbers are always a valid recipe."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atas import recipes
from atas.autotrain import settings
from atas.autotrain.settings import Network, Task
from atas.errors import UsageError

sizes = st.integers(10, 2_000_000)
sides = st.integers(1, 512)


@given(
    images=sizes,
    height=sides,
    width=sides,
    channels=st.sampled_from([1, 3, 4]),
    eps=st.floats(1e-3, 1),
    network=st.builds(Network, st.booleans(), st.booleans()),
    epochs=st.integers(3, 20_000),
)
def test_settings_are_always_a_valid_recipe(images, height, width, channels, eps, network, epochs):
    task = Task(images, (channels, height, width), False, "photos", eps)
    batch = settings.without_single(settings.batch_size(images), images)
    steps = math.ceil(images / batch)
    values = settings.recipe_values(task, network, batch, epochs, steps)
    recipe = recipes.from_dict({}, "auto").with_values(values)
    assert recipe.method.name == "atas-plus"
    assert recipe.method.eps == pytest.approx(eps)
    assert images == 1 or images % batch != 1
    assert recipe.data.pad < min(height, width) or recipe.data.pad == 0
    assert recipes.from_dict(recipe.to_dict(), "auto") == recipe


def test_the_recipes_of_cifar10_are_met():
    """With 391 steps in an epoch, settings are about those of `cifar10-preact-resnet18-plus-...`."""
    task = Task(50_000, (3, 32, 32), False, "cifar10", 8 / 255)
    for name, epochs in (("sprint", 10), ("30s", 30), ("100s", 100), ("300s", 300)):
        recipe = recipes.load(f"cifar10-preact-resnet18-plus-{name}")
        values = settings.recipe_values(task, Network(), settings.batch_size(task.images), epochs, 391)
        for key in ("share", "decay", "from_epoch", "warmup_epochs"):
            assert values[f"method.{key}"] == pytest.approx(recipe.method.settings.get(key, 5)), (name, key)
        assert values["schedule.peak"] == recipe.schedule.peak
        assert values["schedule.peak_at"] == recipe.schedule.peak_at
        assert values["training.batch_size"] == recipe.training.batch_size
        assert values["data.pad"] == recipe.data.pad
        horizon, wanted = (1 / (1 - ema) for ema in (values["training.ema"], recipe.training.ema))
        assert 0.8 < horizon / wanted < 1.25, name


@pytest.mark.parametrize(
    ("images", "expected"), [(10, 3), (30, 10), (299, 99), (500, 100), (1500, 150), (60_000, 5000)]
)
def test_a_tenth_is_held_out(images, expected):
    assert settings.held_out_images(images) == expected


def test_few_images_cannot_be_split():
    with pytest.raises(UsageError, match="there are 9 images in all"):
        settings.held_out_images(9)


def test_fine_tuning_and_no_batchnorm_learn_slowly():
    task = Task(5000, (3, 32, 32), False, "photos", 4 / 255)
    peak = {
        (batchnorm, trained): settings.recipe_values(task, Network(batchnorm, trained), 128, 30, 40)["schedule.peak"]
        for batchnorm in (True, False)
        for trained in (True, False)
    }
    assert peak[True, True] == peak[True, False] / 4 == 0.05
    assert peak[False, True] == peak[False, False] / 4 == 0.00025


@pytest.mark.parametrize(("deep", "peaks"), [(True, [0.025, 0.05, 0.2]), (False, [0.071, 0.1, 0.2])])
def test_small_batches_learn_slowly(deep, peaks):
    task = Task(500, (3, 64, 64), False, "photos", 4 / 255)
    found = [
        settings.recipe_values(task, Network(deep=deep), batch, 30, 28)["schedule.peak"] for batch in (16, 32, 128)
    ]
    assert found == peaks


def test_flips_are_for_photos():
    assert Task(100, (3, 32, 32), False, "photos", 0.1).flips
    assert not Task(100, (1, 28, 28), True, "photos", 0.1).flips
    assert not Task(100, (3, 32, 32), False, "svhn", 0.1).flips
