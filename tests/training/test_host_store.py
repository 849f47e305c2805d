"""Training with perturbations on a grid and on the host: engines announce their batches, and nothing is lost."""

import pytest
import torch
from torch import nn

import atas
from atas.core.dispatch import use_fast_ops
from atas.core.resized_crop import BoxView
from atas.data.loader import DeviceLoader
from atas.recipes import load
from atas.training.engine import Engine
from atas.training.trainer import Interrupted

SHAPE, EXAMPLES, BATCH, EPOCHS = (3, 16, 16), 14, 6, 4


def make_engine(store: str, device: str = "cpu", kind: type[Engine] = Engine) -> Engine:
    settings = load("cifar10-preact-resnet18-atas").with_values(
        {"engine.precision": "float32", "training.batch_size": BATCH, "training.epochs": EPOCHS, "method.grid": 4}
    )
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(256, (EXAMPLES, *SHAPE), dtype=torch.uint8, generator=generator)
    labels = torch.randint(4, (EXAMPLES,), generator=generator)
    place = torch.device(device)
    batches = DeviceLoader(
        images, labels, batch_size=BATCH, pad=0, flip=True, seed=0, device=place,
        views=lambda draw: BoxView.crop(draw, 14, 16),
    )  # fmt: skip
    own = dict(settings.method.settings) | {"warmup_epochs": 1, "reset_every": 3, "store": store}
    method = atas.methods.create("atas", settings.threat, EXAMPLES, SHAPE, pad=0, device=place, **own)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 144, 4))
    return kind(settings, model.to(place), method, batches)


def run(engine: Engine) -> dict[str, torch.Tensor]:
    engine.prepare()
    for epoch in range(EPOCHS):
        engine.start_epoch(epoch, 0)
        for _ in range(len(engine.loader)):
            engine.step()
    return {name: tensor.clone() for name, tensor in engine.state_tensors().items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert list(one) == list(other)
    for name, tensor in one.items():
        assert torch.equal(tensor.cpu(), other[name].cpu()), name


def test_an_engine_trains_the_same_with_rows_on_the_host():
    """Over epochs whose last and first batches share examples, and a reset."""
    assert_same(run(make_engine("device")), run(make_engine("host")))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it itself
@pytest.mark.parametrize("store", ["device", "host"])
def test_a_compiled_step_is_the_plain_step(store):
    """Through the very parts that the captured engine compiles, here with a backend that needs no compiler."""
    torch._dynamo.reset()
    plain, compiled = make_engine(store), make_engine(store)
    for engine, backend in ((plain, None), (compiled, "aot_eager")):
        with use_fast_ops(backend):
            engine.start_epoch(2, 0)
            engine.step()
            engine.step()
    expected = plain.state_tensors()
    for key, found in compiled.state_tensors().items():
        torch.testing.assert_close(found, expected[key], atol=1e-6, rtol=1e-5, msg=key)


def test_every_batch_but_those_of_a_new_epoch_is_announced(monkeypatch):
    engine = make_engine("host")
    seen: list[tuple[str, list[int]]] = []
    for name in ("prefetch", "before_step", "after_step"):
        monkeypatch.setattr(engine.method, name, lambda index, name=name: seen.append((name, index.tolist())))
    monkeypatch.setattr(engine, "execute_step", lambda size: seen.append(("run", [size])))
    engine.start_epoch(2, 1)
    engine.step()
    engine.step()
    order = engine.loader.order(2).tolist()
    second, third = order[6:12], order[12:]
    assert seen == [
        ("prefetch", second), ("before_step", second), ("run", [6]), ("after_step", second),
        ("prefetch", third), ("before_step", third), ("run", [2]), ("after_step", third),
    ]  # fmt: skip


@pytest.mark.parametrize("resumed_on", ["host", "device"])
def test_a_run_goes_on_wherever_its_memory_lives(resumed_on, tmp_path, train_toy, interrupt_after, assert_same_run):
    values = {"method.grid": 4, "method.store": "host", "training.epochs": 2}
    train_toy(tmp_path / "whole", "atas", values)
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "parts", "atas", values, live=interrupt_after(6))
    train_toy(tmp_path / "parts", "atas", values | {"method.store": resumed_on}, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
def test_host_store_trains_as_the_device_store_on_a_gpu(captured):
    from atas.training.cuda_graph_engine import CudaGraphEngine

    kind = CudaGraphEngine if captured else Engine
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert_same(run(make_engine("device", "cuda", kind)), run(make_engine("host", "cuda", kind)))
    finally:
        torch.use_deterministic_algorithms(False)
