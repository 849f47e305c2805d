"""Training with shifted boxes and erased rectangles: loops, loaders, engines, resumes, and wrong settings."""

import pytest
import torch
import torch.nn.functional as F

import atas
from atas import recipes
from atas.core.crop_shift import ShiftView
from atas.core.dispatch import use_fast_ops
from atas.core.erasing import ErasedView
from atas.core.rng import CounterRNG
from atas.data.loader import DeviceLoader
from atas.errors import UsageError
from atas.recipes import fingerprint
from atas.training import checkpoint
from atas.training.engine import Engine
from atas.training.trainer import Interrupted

SHIFT = {"data.view": "cropshift", "data.shift": 3}
ERASE = {"data.erase": 0.7, "data.erase_area": (0.1, 0.4)}
UNTIL = {"data.view_until": 0.67}
STREAM = {"data.loading": "streaming", "data.workers": 2}


def test_a_run_is_what_a_loop_by_hand_gives(tmp_path, train_toy, toy_data, tiny_net):
    """Also after the epoch from which on nothing is shifted or erased any more."""
    run = train_toy(tmp_path / "run", values=SHIFT | ERASE | UNTIL | {"method.dtype": "float32"})
    own = dict(run.recipe.method.settings) | {"dtype": torch.float32}
    model, size = tiny_net(), (8, 8)
    method = atas.ATAS(run.recipe.threat, examples=60, shape=(1, *size), pad=0, **own)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    images, labels = toy_data.train.images, toy_data.train.labels
    batches = DeviceLoader(images, labels, batch_size=16, pad=0, flip=True, seed=0, device=torch.device("cpu"))
    updates = 0
    for epoch in range(3):
        method.start_epoch(epoch, epochs=3)
        for index in batches.order(epoch).split(16):
            rng = CounterRNG(0, torch.tensor(epoch), index)
            view = ErasedView.draw(rng, ShiftView.draw(rng, size, 3, until=2), size, 0.7, (0.1, 0.4), until=2)
            x, y = view.apply(images[index].float()) / 255, labels[index]
            if epoch < 2:
                assert (view.height > 0).any()
            else:
                assert torch.equal(
                    x, torch.where(view.view.flip[:, None, None, None], images[index].flip(-1), images[index]) / 255
                )
            x_adv = method.perturb(model, x, y, index, view)
            optimizer.param_groups[0]["lr"] = 0.05 * 0.1 ** ((updates >= 6) + (updates >= 10))
            optimizer.zero_grad()
            F.cross_entropy(model.train()(x_adv), y).backward()
            optimizer.step()
            updates += 1
    for name, tensor in run.model.state_dict().items():
        torch.testing.assert_close(tensor, model.state_dict()[name], atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("method", "values"),
    [
        ("atas", SHIFT | ERASE | UNTIL),
        ("atta", SHIFT | STREAM | {"method.store": "host"}),
        ("fgsm-rs", ERASE),
        ("free", SHIFT),
    ],
)
@pytest.mark.slow
def test_stopped_it_ends_with_the_same_bits(method, values, tmp_path, train_toy, interrupt_after, assert_same_run):
    train_toy(tmp_path / "whole", method, values)
    for _ in range(2):
        with pytest.raises(Interrupted):
            train_toy(tmp_path / "parts", method, values, resume=True, live=interrupt_after(5))
    train_toy(tmp_path / "parts", method, values, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("values", [SHIFT, ERASE, SHIFT | ERASE], ids=["shift", "erase", "both"])
@pytest.mark.slow
def test_streamed_or_resident_a_run_is_the_same(values, tmp_path, train_toy, assert_same_run):
    train_toy(tmp_path / "resident", values=values)
    train_toy(tmp_path / "streaming", values=values | STREAM)
    assert_same_run(tmp_path / "resident", tmp_path / "streaming")


def test_shifted_boxes_need_no_memory_of_a_border(tmp_path, train_toy):
    train_toy(tmp_path / "shift", values=SHIFT | {"training.epochs": 1, "data.pad": 3})
    train_toy(tmp_path / "pad", values=ERASE | {"training.epochs": 1, "data.pad": 3})
    for name, side in (("shift", 8), ("pad", 14)):
        tensors, _ = checkpoint.load(tmp_path / name / "checkpoints" / "last.safetensors")
        assert tensors["method.memory.delta"].shape == (60, 1, side, side)


def make_engine(tiny_net, values, device="cpu", kind=Engine, **more):
    document = {
        "data": {"flip": True},
        "method": {"name": "atas", "eps": 0.1, "dtype": "float32", "warmup_epochs": 1},
        "schedule": {"peak": 0.05},
        "training": {"epochs": 4, "batch_size": 16},
        "engine": {"precision": "float32"},
    }
    settings, place = recipes.from_dict(document, "views").with_values(values), torch.device(device)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(1, 256, (28, 1, 8, 8), dtype=torch.uint8, generator=generator)
    labels, pad = torch.arange(28) % 3, settings.data.frame_pad
    batches = DeviceLoader(images, labels, batch_size=16, pad=pad, flip=True, seed=0, device=place)
    own = settings.method.settings
    method = atas.methods.create("atas", settings.threat, 28, (1, 8, 8), pad=pad, device=place, **own)
    return kind(settings, tiny_net().to(place), method, batches, **more)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it itself
@pytest.mark.parametrize("values", [SHIFT | UNTIL, ERASE, SHIFT | ERASE], ids=["shift", "erase", "both"])
def test_a_compiled_step_is_the_plain_step(values, tiny_net):
    torch._dynamo.reset()
    plain, compiled = make_engine(tiny_net, values), make_engine(tiny_net, values)
    compiled.compute_model.forward = torch.compile(compiled.compute_model.forward, backend="aot_eager", fullgraph=True)
    for engine, backend in ((plain, None), (compiled, "aot_eager")):
        with use_fast_ops(backend):
            for epoch in (1, 3):
                engine.start_epoch(epoch, 0)
                engine.step()
    expected = plain.state_tensors()
    for key, found in compiled.state_tensors().items():
        torch.testing.assert_close(found, expected[key], atol=1e-5, rtol=1e-4, msg=key)


@pytest.mark.gpu
@pytest.mark.parametrize("values", [SHIFT | UNTIL, ERASE, SHIFT | ERASE], ids=["shift", "erase", "both"])
def test_a_captured_step_is_the_eager_step(values, tiny_net):
    from atas.training.cuda_graph_engine import CudaGraphEngine

    said = []
    allowed, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    try:
        eager = make_engine(tiny_net, values, "cuda")
        captured = make_engine(tiny_net, values, "cuda", CudaGraphEngine, log=said.append)
        for epoch in (1, 2, 3):
            before, updates = {key: tensor.clone() for key, tensor in eager.state_tensors().items()}, eager.updates
            for engine in (eager, captured):
                engine.load_state_tensors(before, updates)
                engine.start_epoch(epoch, 0)
                engine.step()
                engine.step()
            expected = eager.state_tensors()
            for key, found in captured.state_tensors().items():
                if key == "method.memory.delta":
                    assert ((found - expected[key]).abs() < 1e-3).float().mean() >= 0.99
                else:
                    torch.testing.assert_close(found, expected[key], atol=1e-3, rtol=1e-3, msg=key)
    finally:
        torch.backends.cudnn.allow_tf32 = allowed
    assert not any("slower" in sentence or "without compilation" in sentence for sentence in said), said


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"data.view": "cropshit"}, "did you mean 'cropshift'"),
        ({"data.erase": 1.5}, "data.erase is a probability in [0, 1]; got 1.5"),
        (ERASE | {"data.erase_area": (0.3, 0.2)}, "data.erase_area is the (smallest, largest) share"),
        (UNTIL, "data.view_until has no effect without data.view = cropshift or data.erase; set data.view"),
        (SHIFT | {"data.view_until": 0.0}, "data.view_until is a share of the training in (0, 1]"),
        (SHIFT | {"method.grid": 4}, "leave out method.grid"),
        ({"optimizer.perturb": "ascend"}, "did you mean 'ascent'"),
        ({"optimizer.perturb": "ascent", "method.name": "yopo"}, "YOPO cannot perturb weights in the form ascent"),
        ({"optimizer.perturb": "ascent", "optimizer.perturb_gamma": -1}, "perturb_gamma must not be negative; got -1"),
        (SHIFT | {"data.view_size": 4}, "data.view_size has no effect without data.view = crop or resized"),
    ],
)
def test_wrong_settings(values, part, toy_recipe):
    with pytest.raises(UsageError) as error:
        toy_recipe(values=values)
    assert part in str(error.value)
    assert "\n" not in str(error.value)


def test_a_shift_leaves_something_of_an_image(tmp_path, train_toy):
    with pytest.raises(UsageError, match="below the 8 pixels of the shorter side; got 8"):
        train_toy(tmp_path / "run", values=SHIFT | {"data.shift": 8})


def test_recipes_without_are_the_runs_that_they_were(toy_recipe):
    known = fingerprint.weight_keys(toy_recipe().to_dict())
    assert not {"shift", "erase", "erase_area", "view_until"} & set(known["data"])
    assert not {"perturb", "perturb_gamma", "perturb_from"} & set(known["optimizer"])
    prints = [fingerprint.recipe_fingerprint(toy_recipe(values=values)) for values in ({}, SHIFT, ERASE)]
    assert len(set(prints)) == 3
