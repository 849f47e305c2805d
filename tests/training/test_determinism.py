"""`engine.deterministic`: the same bits on CUDA too; every switch is put back."""

import pytest
import torch

import atas
from atas.training.job import deterministic
from atas.training.trainer import Interrupted


def switches():
    return torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark


@pytest.mark.parametrize("wanted", [True, False])
def test_switches_are_put_back(wanted):
    before = switches()
    with deterministic(wanted):
        assert switches() == ((True, False) if wanted else before)
    assert switches() == before


def test_a_run_is_deterministic_inside_alone(tmp_path, train_toy, observer):
    seen = []
    live = observer(on_batch=lambda _: seen.append(switches()))
    train_toy(tmp_path / "run", values={"engine.deterministic": True}, live=live)
    assert set(seen) == {(True, False)}
    assert switches()[0] is False


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["captured", "eager"])
def test_resume_on_cuda_ends_with_the_same_bits(kind, tmp_path, interrupt_after, assert_same_run):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (600, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.randint(10, (600,), generator=generator)
    data = atas.data.from_arrays("noise", images, labels, images[:50], labels[:50])
    values = {
        "engine.deterministic": True,
        "engine.kind": kind,
        "training.epochs": 2,
        "training.batch_size": 128,
        "training.probe": 64,
        "training.ema": 0.9,
    }

    def go(name, **options):
        atas.train("cifar10-preact-resnet18-atas", out=tmp_path / name, data=data, values=values, **options)

    go("whole")
    with pytest.raises(Interrupted):
        go("parts", live=interrupt_after(7))
    go("parts", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
