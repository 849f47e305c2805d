"""The recipes for large images: every ImageNet row of the paper, and starting points of our own."""

import itertools

import pytest
import torch
from helpers.images import noise_image
from PIL import Image

import atas
from atas import methods, recipes
from atas.paper import published
from atas.recipes import fingerprint
from atas.training import TrainingProgress, checkpoint
from atas.training.data import load_eval_data, train_resolution
from atas.training.schedule import learning_rate

METHODS = ("free", "yopo", "fgsm-rs", "fgsm-ga", "atta", "atas")
DROPS = (0.1, (50 / 90, 75 / 90), 90, 128)

# Peak rate, milestones, epochs, batch, and what the attack does at a budget of eps.
PAPER = {
    "free": ((0.1, (1 / 3, 2 / 3), 45, 256), lambda eps: {"updates_per_step": 4, "step_size": eps}),
    "yopo": ((0.04, (30 / 36, 34 / 36), 36, 256), lambda eps: {"outer": 5, "inner": 3, "step_size": 2 / 255}),
    "fgsm-rs": (DROPS, lambda eps: {"step_size": 1.25 * eps}),
    "fgsm-ga": (DROPS, lambda eps: {"weight": 0.005 if eps < 3 / 255 else 0.01}),
    "atta": (DROPS, lambda eps: {"step_size": 4 / 255, "reset_every": 10}),
    "atas": (
        DROPS,
        lambda eps: {
            "c": 12.8,
            "max_step": 16 / 255,
            "beta": 0.5,
            "clip": (4 / 255, 8 / 255),
            "warmup_epochs": 5,
            "reset_every": 10,
        },
    ),
}
ROWS = [
    row
    for row in itertools.product(("resnet18", "resnet50"), METHODS, (2, 4))
    if row[:2] != ("resnet50", "fgsm-ga")  # did not fit the authors' GPUs
]


def name_of(network, method, eps):
    return f"imagenet-{network}-{method}" + ("-eps4" if eps == 4 else "")


@pytest.mark.parametrize(("network", "method", "eps"), ROWS)
def test_every_row_of_the_paper(network, method, eps):
    loaded = recipes.load(name_of(network, method, eps))
    assert (loaded.model.name, loaded.method.name, loaded.method.eps) == (network, method, eps / 255)
    assert published.lookup("imagenet", network, eps / 255, method) is not None
    peak, milestones, epochs, batch = PAPER[method][0]
    schedule, training = loaded.schedule, loaded.training
    assert (schedule.name, schedule.peak, schedule.factor) == ("piecewise", peak, 0.1)
    assert schedule.milestones == pytest.approx(milestones)
    assert (training.epochs, training.batch_size, training.ema) == (epochs, batch, 0)
    assert (loaded.optimizer.momentum, loaded.optimizer.weight_decay) == (0.9, 1e-4)
    data = loaded.data
    assert (data.name, data.size, data.view, data.flip) == ("packed", 256, "crop", True)
    assert {train_resolution(data, epoch, epochs) for epoch in range(epochs)} == {224}
    made = methods.create(method, loaded.threat, 4, (3, 224, 224), **loaded.method.settings)
    for key, value in PAPER[method][1](eps / 255).items():
        assert getattr(made, key) == pytest.approx(value), key
    if method in ("atta", "atas"):
        assert made.memory.delta.shape == (4, 3, 32, 32)
        assert made.memory.nbytes / 4 * 1_281_167 == pytest.approx(3.9e9, rel=0.01)


def test_drops_fall_on_the_first_update_of_epochs_51_and_76():
    schedule, steps = recipes.load("imagenet-resnet18-atas").schedule, 10_010  # 1,281,167 images in batches of 128
    updates = torch.tensor([epoch * steps + step for epoch in range(90) for step in (0, 10_009)])
    rates = learning_rate(schedule, updates, 90 * steps).tolist()
    assert rates == pytest.approx([0.1] * 100 + [0.01] * 50 + [0.001] * 30)


@pytest.mark.parametrize("network", ["resnet18", "resnet50"])
def test_the_modern_recipe(network):
    loaded = recipes.load(f"imagenet-{network}-atas-modern")
    assert (loaded.model.name, loaded.training.epochs, loaded.training.batch_size) == (network, 30, 1024)
    assert (loaded.data.view, loaded.data.view_scale) == ("resized", (0.25, 1.0))
    shown = [train_resolution(loaded.data, epoch, 30) for epoch in range(30)]
    assert shown == [128] * 7 + [160] * 7 + [192] * 7 + [224] * 9
    assert loaded.schedule.peak == 0.1 * loaded.training.batch_size / 128
    assert (loaded.engine.precision, loaded.training.ema) == ("bf16", 0.9995)
    paper_s = recipes.load(f"imagenet-{network}-atas")
    assert loaded.method == paper_s.method


def test_imagenette_differs_in_the_method_alone():
    base = recipes.load("imagenette-resnet18-atas")
    assert (base.data.name, base.method.eps, base.training.epochs) == ("imagefolder", 4 / 255, 60)
    for method in ("atta", "fgsm-rs"):
        other = recipes.load(f"imagenette-resnet18-{method}")
        assert other.method.name == method
        assert {line.split(".")[0] for line in fingerprint.differences(base, other)} == {"method"}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Noise in three colours, which are the classes: 24 pictures to train on, 9 to test with."""
    root = tmp_path_factory.mktemp("imagenette")
    for half, count in (("train", 8), ("val", 3)):
        for name, colour in (("red", (200, 60, 60)), ("green", (60, 200, 60)), ("blue", (60, 60, 200))):
            (root / half / name).mkdir(parents=True)
            for number in range(count):
                noise = noise_image(48, 40, seed=number)
                Image.blend(noise, Image.new("RGB", noise.size, colour), 0.7).save(root / half / name / f"{number}.jpg")
    return root


@pytest.mark.slow
@pytest.mark.parametrize("method", ["atas", "atta", "fgsm-rs"])
def test_imagenette_in_small(method, photos, tmp_path):
    """The recipe as it is, with small images and few epochs: from files to figures under attack."""
    small = {
        "data.size": 40,
        "data.view_size": 32,
        "training.epochs": 3,
        "training.batch_size": 8,
        "schedule.peak": 0.01,
    }
    values = {"data.root": str(photos), "training.probe": 6, "training.loggers": [], "engine.device": "cpu"} | small
    run = atas.train(f"imagenette-resnet18-{method}", out=tmp_path, values=values, live=TrainingProgress(quiet=True))
    losses = [row["loss"] for row in run.metrics]
    assert losses[-1] < losses[0]
    test = load_eval_data(run.recipe).test
    result = atas.evaluate(run.model, test, threat=run.recipe.threat, attacks=("pgd10",))
    assert result.protocol["image_shape"] == [3, 32, 32]
    assert result.accuracy["pgd10"] <= result.accuracy["clean"]
    if method != "fgsm-rs":
        tensors, _ = checkpoint.load(tmp_path / "checkpoints" / "last.safetensors")
        delta = tensors["method.memory.delta"]
        assert (delta.shape, delta.dtype) == ((24, 3, 32, 32), torch.int8)
        assert (delta.abs() == 127).float().mean() > 0.2  # of fresh noise it would be 1 in 254


@pytest.mark.parametrize("name", [name for name in recipes.names() if name.startswith("imagenet")])
def test_files_and_packed_sets_are_a_setting_away(name):
    for kind in ("imagefolder", "packed"):
        assert recipes.load(name).with_values({"data.name": kind, "data.root": "x"}).data.size == 256
