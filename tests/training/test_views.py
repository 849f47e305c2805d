"""Images shown as boxes of larger ones: the sizes by epoch, what training and evaluation see, and wrong settings."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import atas
from atas import recipes
from atas.core.dispatch import use_fast_ops
from atas.core.resized_crop import BoxView
from atas.core.rng import CounterRNG
from atas.data import Dataset, Split
from atas.data.loader import DeviceLoader
from atas.errors import DataError, UsageError
from atas.recipes import DataConfig, fingerprint
from atas.training.data import eval_view, train_resolution, train_views
from atas.training.engine import Engine
from atas.training.trainer import Interrupted

CROP = {"data.view": "crop", "data.view_size": 32, "method.grid": 8}
RESIZED = {"data.view": "resized", "data.view_size": 32, "data.view_scale": (0.25, 1.0), "method.grid": 8}
RISING = {"data.view_start": 16, "data.view_ramp": 0.5}
STREAM = {"data.loading": "streaming", "data.workers": 2}


def make_split(count, seed, side=40, channels=1):
    """Noise in which the class shows as a bright band across the middle."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    images = torch.rand(count, channels, side, side, generator=generator) * 0.5
    for image, label in zip(images, labels.tolist(), strict=True):
        image[:, 8 + 8 * label : 14 + 8 * label] += 0.5
    return (images * 255).byte(), labels


@pytest.fixture(scope="module")
def large():
    """Sixty images of 40 x 40 pixels and thirty for testing."""
    return atas.data.from_arrays("large", *make_split(60, 1), *make_split(30, 2))


@pytest.fixture
def train_large(train_toy, large):
    def train(out, method="atas", values=None, **options):
        values = dict(CROP if values is None else values)
        if method not in ("atas", "atta", "atas-literal"):
            values.pop("method.grid", None)
        return train_toy(out, method, values, **{"data": large, **options})

    return train


# Sizes


def sizes(start, ramp, epochs, size=224):
    data = DataConfig(view="resized", view_size=size, view_start=start, view_ramp=ramp)
    return [train_resolution(data, epoch, epochs) for epoch in range(epochs)]


def test_the_size_rises_in_multiples_of_32():
    assert sizes(128, 0.7, 30) == [128] * 7 + [160] * 7 + [192] * 7 + [224] * 9
    assert sizes(128, 1.0, 4) == [128, 128, 160, 192]
    assert sizes(100, 0.5, 8) == [100, 128, 160, 192, 224, 224, 224, 224]
    assert sizes(128, 0.001, 3) == [128, 224, 224]
    assert sizes(96, 0.5, 8, size=100) == [96, 96, 96, 96, 100, 100, 100, 100]


def test_the_size_is_constant_where_nothing_is_said():
    assert train_resolution(DataConfig(), 3, 30) is None
    assert train_resolution(DataConfig(view="crop"), 0, 30) == 224
    assert {train_resolution(DataConfig(view="resized", view_size=64), epoch, 9) for epoch in range(9)} == {64}


@given(start=st.integers(1, 223), ramp=st.floats(0.01, 1), epochs=st.integers(1, 200), epoch=st.integers(0, 300))
def test_sizes_of_any_schedule(start, ramp, epochs, epoch):
    data = DataConfig(view="crop", view_start=start, view_ramp=ramp)
    now, then = (train_resolution(data, e, epochs) for e in (epoch, epoch + 1))
    assert start <= now <= then <= 224
    assert now in (start, 224) or now % 32 == 0
    assert train_resolution(data, 0, epochs) == start
    assert train_resolution(data, epochs, epochs) == 224
    line = start + (224 - start) * min(1, epoch / (ramp * epochs))
    assert line - 32 < now <= line + 1e-5


# What is drawn


def draw(count=50, epoch=3):
    return CounterRNG(7, torch.tensor(epoch), torch.arange(count))


def test_a_crop_shows_stored_pixels_and_at_small_sizes_as_large_a_part():
    images = torch.arange(50 * 40 * 40).view(50, 1, 40, 40).float()
    data = DataConfig(view="crop", view_size=32, flip=False)
    view = train_views(data, 32, (40, 40))(draw())
    shown = view.apply(images)
    for row, (top, left) in enumerate(zip((view.top * 40).tolist(), (view.left * 40).tolist(), strict=True)):
        top, left = round(top), round(left)
        assert 0 <= top <= 8
        assert torch.equal(shown[row], images[row, :, top : top + 32, left : left + 32])
    small = train_views(data, 16, (40, 40))(draw())
    assert small.size == (16, 16)
    assert torch.equal(small.height, torch.full((50,), 16 / 20, dtype=torch.float64))


def test_a_resized_box_has_the_share_that_was_asked_for():
    data = DataConfig(view="resized", view_size=32, view_scale=(0.25, 0.5))
    view = train_views(data, 24, (400, 400))(draw(400))
    area = view.height * view.width
    assert view.size == (24, 24)
    assert 0.245 < area.min() < 0.27
    assert 0.48 < area.max() < 0.505
    usual = train_views(DataConfig(view="resized"), 24, (400, 400))(draw(400))
    assert (usual.height * usual.width).min() < 0.1
    assert view.flip.any()
    assert not train_views(DataConfig(view="resized", flip=False), 24, (400, 400))(draw()).flip.any()


# What the monitor and an evaluation see


def test_the_centre_of_224_out_of_256():
    images = torch.randint(256, (2, 3, 256, 256), dtype=torch.uint8)
    split = Split(images, torch.tensor([0, 1]), ("a", "b"))
    seen = eval_view(Dataset("x", split, split), DataConfig(view="crop"))
    assert seen.shape == (3, 224, 224)
    assert torch.equal(seen.test.images, images[:, :, 16:240, 16:240])
    assert eval_view(Dataset("x", split, split), DataConfig()).shape == (3, 256, 256)


def test_images_on_the_disk_stay_there(photos, tmp_path):
    atas.data.pack(photos, tmp_path / "packed", size=40)
    whole = atas.data.load("packed", tmp_path / "packed")
    seen = eval_view(whole, DataConfig(view="resized", view_size=32)).test
    assert not isinstance(seen.images, torch.Tensor)
    assert seen.images.shape == (9, 3, 32, 32)
    assert torch.equal(seen.images[:], whole.test.images[:][:, :, 4:36, 4:36])
    some = torch.tensor([5, 2])
    assert torch.equal(seen.part(some).images[:], whole.test.images[some][:, :, 4:36, 4:36])
    assert seen.fingerprint() != whole.test.fingerprint()
    odd = whole.test.centre(33).images[0]
    assert torch.equal(odd, whole.test.images[0][:, 3:36, 3:36])
    with pytest.raises(DataError, match="40 x 40 pixels have no centre of 41 x 41"):
        whole.test.centre(41).images[0]


def test_images_that_are_too_small_or_no_squares():
    def data(*sides):
        split = Split(torch.zeros(2, 1, *sides, dtype=torch.uint8), torch.tensor([0, 1]), ("a", "b"))
        return Dataset("x", split, split)

    with pytest.raises(UsageError, match=r"images of 40 x 30 pixels are smaller than data.view_size = 32"):
        eval_view(data(40, 30), DataConfig(view="resized", view_size=32))
    with pytest.raises(UsageError, match=r"data\.view = crop is for square images"):
        eval_view(data(40, 50), DataConfig(view="crop", view_size=32))
    assert eval_view(data(40, 50), DataConfig(view="resized", view_size=32)).shape == (1, 32, 32)


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A folder of small colour photos, larger than they are stored."""
    root = tmp_path_factory.mktemp("photos")
    random = np.random.default_rng(0)
    for half, count in (("train", 8), ("test", 3)):
        for name in "abc":
            (root / half / name).mkdir(parents=True)
            for number in range(count):
                pixels = random.integers(0, 256, (48, 60, 3), np.uint8)
                Image.fromarray(pixels).save(root / half / name / f"{number}.png")
    return root


@pytest.mark.slow
def test_a_run_is_evaluated_on_centres(photos, tmp_path, train_toy, tiny_net):
    """From files as from a packed set; and the recipe's size is compared with that of the set."""
    from atas.cli.evaluate import EvaluateOptions
    from atas.cli.target import from_run

    atas.data.pack(photos, tmp_path / "packed", size=40)
    values = CROP | RISING | {"data.size": 40, "training.epochs": 2, "training.probe": 5}
    packed = values | {"data.name": "packed", "data.root": str(tmp_path / "packed")}
    files = values | {"data.name": "imagefolder", "data.root": str(photos)}
    runs = [
        train_toy(tmp_path / name, values=given, data=None, model=tiny_net(channels=3))
        for name, given in (("1", packed), ("2", files), ("3", files | STREAM), ("4", packed | STREAM))
    ]
    first = runs[0].model.state_dict()
    for run in runs[1:]:
        for name, tensor in run.model.state_dict().items():
            assert torch.equal(tensor, first[name]), name
    centres = atas.data.load("packed", tmp_path / "packed").test.images[:][:, :, 4:36, 4:36]
    for run in runs:
        subject = from_run(run, EvaluateOptions())
        assert tuple(subject.test.images.shape) == (9, 3, 32, 32)
        assert torch.equal(subject.test.images[:], centres)
    result = atas.evaluate(runs[0].model, subject.test, threat=atas.Linf(0.1), attacks=("fgsm",))
    assert result.protocol["image_shape"] == [3, 32, 32]
    with pytest.raises(DataError, match=r"images of 40 pixels, and the recipe has data\.size = 44; pack it with"):
        train_toy(tmp_path / "5", values=packed | {"data.size": 44}, data=None, model=tiny_net(channels=3))


def test_the_weights_say_which_images_they_are_for(tmp_path, train_large):
    from safetensors import safe_open

    train_large(tmp_path / "run", values=CROP | {"training.epochs": 1})
    with safe_open(tmp_path / "run" / "model.safetensors", framework="pt") as file:
        about = json.loads(file.metadata()["atas-model-1"])
    assert about["shape"] == [1, 32, 32]


# Training


@pytest.mark.parametrize("values", [CROP | RISING, RESIZED | RISING], ids=["crop", "resized"])
@pytest.mark.slow
def test_a_run_is_what_a_loop_by_hand_gives(values, tmp_path, train_large, large, tiny_net):
    run = train_large(tmp_path / "run", values=values | {"training.epochs": 4, "method.dtype": "float32"})
    settings = run.recipe
    model, own = tiny_net(), dict(settings.method.settings) | {"dtype": torch.float32}
    method = atas.ATAS(settings.threat, examples=60, shape=(1, 40, 40), **own)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    images, labels = large.train.images.float(), large.train.labels
    batches = DeviceLoader(images.byte(), labels, batch_size=16, pad=0, flip=True, seed=0, device=torch.device("cpu"))
    updates, seen = 0, []
    for epoch in range(4):
        side = 16 if epoch < 2 else 32
        method.start_epoch(epoch, epochs=4)
        for index in batches.order(epoch).split(16):
            numbers = CounterRNG(0, torch.tensor(epoch), index)
            view = (
                BoxView.crop(numbers, side, 40 * side // 32)
                if values["data.view"] == "crop"
                else BoxView.resized(numbers, side, (40, 40), (0.25, 1.0))
            )
            x, y = view.apply(images[index]) / 255, labels[index]
            seen.append(x.shape[-1])
            model.train()
            x_adv = method.perturb(model, x, y, index, view)
            optimizer.param_groups[0]["lr"] = 0.05 * 0.1 ** ((updates >= 8) + (updates >= 12.8))
            optimizer.zero_grad()
            F.cross_entropy(model(x_adv), y).backward()
            optimizer.step()
            updates += 1
    assert seen == [16] * 8 + [32] * 8
    for name, tensor in run.model.state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "values"),
    [
        ("atas", CROP | RISING),
        ("atas", RESIZED | RISING | STREAM),
        ("atta", RESIZED | RISING | {"method.store": "host"}),
        ("fgsm-rs", RESIZED | RISING),
        ("yopo", CROP | RISING),
        ("free", CROP),
    ],
)
def test_stopped_in_every_epoch_it_ends_with_the_same_bits(
    method, values, tmp_path, train_large, interrupt_after, assert_same_run
):
    values = values | {"training.epochs": 4, "training.ema": 0.9}
    train_large(tmp_path / "whole", method, values)
    for _ in range(3):
        with pytest.raises(Interrupted):
            train_large(tmp_path / "parts", method, values, resume=True, live=interrupt_after(5))
    train_large(tmp_path / "parts", method, values, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.slow
def test_streamed_or_resident_a_run_is_the_same(tmp_path, train_large, assert_same_run):
    train_large(tmp_path / "resident", values=RESIZED | RISING)
    train_large(tmp_path / "streaming", values=RESIZED | RISING | STREAM)
    assert_same_run(tmp_path / "resident", tmp_path / "streaming")


def test_the_size_is_part_of_a_run(tmp_path, train_large, interrupt_after):
    with pytest.raises(Interrupted):
        train_large(tmp_path / "run", values=CROP | RISING, live=interrupt_after(2))
    with pytest.raises(UsageError, match=r"data\.view_start: 16 became 24"):
        train_large(tmp_path / "run", values=CROP | RISING | {"data.view_start": 24}, resume=True)


def test_the_memory_is_of_the_grid_and_has_learnt(tmp_path, train_large):
    from atas.training import checkpoint

    train_large(tmp_path / "run", values=CROP | RISING | {"method.reset_every": 100})
    tensors, _ = checkpoint.load(tmp_path / "run" / "checkpoints" / "last.safetensors")
    assert tensors["method.memory.delta"].shape == (60, 1, 8, 8)
    fresh = atas.ATAS(atas.Linf(0.1), examples=60, shape=(1, 32, 32), grid=8)
    fresh.start_epoch(0)
    assert (tensors["method.memory.delta"] != fresh.memory.delta).flatten(1).any(1).all()


@pytest.mark.slow
def test_resnet18_at_a_small_size(tmp_path, train_large):
    """The network of ImageNet, whose pooling takes images of any size."""
    model = atas.models.create("resnet18", 3, channels=1)
    values = CROP | RISING | {"training.epochs": 2, "training.probe": 4, "training.batch_size": 30}
    run = train_large(tmp_path / "run", values=values, model=model)
    assert [row["shown"] for row in run.metrics] == [16, 32]


# Other engines


def make_engine(tiny_net, device="cpu", kind=Engine, method="atas", **more):
    own = {"grid": 8, "dtype": "float32", "warmup_epochs": 1} if method == "atas" else {}
    document = {
        "data": {"view": "resized", "view_size": 32, "view_start": 16, "view_ramp": 0.5, "view_scale": (0.25, 1.0)},
        "method": {"name": method, "eps": 0.1, **own},
        "schedule": {"peak": 0.05},
        "training": {"epochs": 4, "batch_size": 16},
        "engine": {"precision": "float32"},
    }
    settings, place = recipes.from_dict(document, "views"), torch.device(device)
    batches = DeviceLoader(*make_split(28, 3), batch_size=16, pad=4, flip=True, seed=0, device=place)
    method = atas.methods.create(method, settings.threat, 28, (1, 32, 32), device=place, **settings.method.settings)
    return kind(settings, tiny_net().to(place), method, batches, **more)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it itself
def test_a_compiled_step_is_the_plain_step_at_every_size(tiny_net):
    torch._dynamo.reset()
    plain, compiled = make_engine(tiny_net), make_engine(tiny_net)
    compiled.compute_model.forward = torch.compile(
        compiled.compute_model.forward, backend="aot_eager", fullgraph=True, dynamic=False
    )
    for engine, backend in ((plain, None), (compiled, "aot_eager")):
        with use_fast_ops(backend):
            for epoch, side in ((1, 16), (2, 32)):
                engine.start_epoch(epoch, 0)
                engine.step()
                assert engine.resolution == side
    expected = plain.state_tensors()
    for key, found in compiled.state_tensors().items():
        torch.testing.assert_close(found, expected[key], atol=1e-5, rtol=1e-4, msg=key)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["atas", "fgsm-rs", "yopo"])
def test_a_captured_step_is_the_eager_step_at_every_size(method, tiny_net):
    """Whole batches and short ones; sizes change after an epoch's end, and back as after a rollback."""
    from atas.training.cuda_graph_engine import CudaGraphEngine

    said = []
    allowed, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    try:
        eager = make_engine(tiny_net, "cuda", method=method)
        captured = make_engine(tiny_net, "cuda", CudaGraphEngine, method, log=said.append)
        for epoch, side in ((1, 16), (2, 32), (3, 32), (1, 16)):
            before, updates = {key: tensor.clone() for key, tensor in eager.state_tensors().items()}, eager.updates
            for engine in (eager, captured):
                engine.load_state_tensors(before, updates)
                engine.start_epoch(epoch, 0)
                engine.step()
                engine.step()
                assert engine.resolution == side
            expected = eager.state_tensors()
            for key, found in captured.state_tensors().items():
                if key == "method.memory.delta":
                    assert ((found - expected[key]).abs() < 1e-3).float().mean() >= 0.99
                elif not key.endswith("num_batches_tracked"):
                    torch.testing.assert_close(found, expected[key], atol=1e-3, rtol=1e-3, msg=key)
    finally:
        torch.backends.cudnn.allow_tf32 = allowed
    assert not any("slower" in sentence for sentence in said), said
    if method != "yopo":
        assert sum("compiling the training step for images of 32 x 32" in sentence for sentence in said) == 1


# Mistakes


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"data.view": "crops"}, "unknown value of data.view 'crops'; did you mean 'crop'?"),
        ({"data.view": "pad"}, "data.view_size has no effect without data.view = crop or resized"),
        ({"data.view": "pad", "data.view_size": None}, None),
        ({"data.view_scale": (0.1, 1)}, "data.view_scale has no effect without data.view = resized"),
        ({"data.view": "resized", "data.view_scale": (0.5, 0.4)}, "data.view_scale is the (smallest, largest) share"),
        ({"data.view": "resized", "data.view_scale": (0, 1)}, "share of an image in (0, 1]"),
        ({"data.view": "resized", "data.view_scale": 0.5}, "data.view_scale must be a list of 2 numbers"),
        ({"data.view_size": 300}, "data.view_size must be at least 1 pixel and at most the 256 of data.size; got 300"),
        ({"data.view_size": 0}, "data.view_size must be at least 1 pixel"),
        ({"data.view_start": 128}, "data.view_start and data.view_ramp belong together"),
        ({"data.view_ramp": 0.5}, "data.view_start and data.view_ramp belong together"),
        ({"data.view_start": 224, "data.view_ramp": 0.5}, "data.view_start must be at least 1 pixel and below 224"),
        ({"data.view_start": 0, "data.view_ramp": 0.5}, "data.view_start must be at least 1 pixel"),
        ({"data.view_start": 128, "data.view_ramp": 1.5}, "data.view_ramp is a share of the training in (0, 1]"),
        ({"data.view_start": 128, "data.view_ramp": 0}, "data.view_ramp is a share of the training in (0, 1]"),
        ({"method.grid": None}, "method atas cannot keep a perturbation for every stored pixel; set method.grid"),
        ({"method.name": "atta"}, "method atta cannot keep a perturbation for every stored pixel; set method.grid"),
        ({"method.name": "fgsm-rs"}, None),
        *(
            ({"method.name": name, "data.view_start": 128, "data.view_ramp": 0.5}, "leave out data.view_start")
            for name in ("free", "fgsm-pgi", "fgsm-pco", "tdat", "liet", "fgsm-uap", "fgsm-pgk", "fgsm-mep-cs")
        ),
        ({"method.name": "fgsm-pgi"}, None),
        ({"method.name": "fgsm-pgi", "method.frame": "image"}, "leave out method.frame"),
        ({"method.name": "fgsm-pco", "method.frame": "image"}, "leave out method.frame"),
    ],
)
def test_wrong_settings(values, part):
    base = recipes.load("imagenet-resnet18-atas")
    if part is None:
        base.with_values(values)
        return
    with pytest.raises(UsageError) as error:
        base.with_values(values)
    assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_recipes_without_views_are_the_runs_that_they_were(toy_recipe):
    """Checkpoints from before there were views go on."""
    assert "view" not in fingerprint.weight_keys(toy_recipe().to_dict())["data"]
    assert fingerprint.recipe_fingerprint(toy_recipe(values=CROP)) != fingerprint.recipe_fingerprint(
        toy_recipe(values={"method.grid": 8})
    )
