"""No kernel is silently unused: not because a type was renamed, and not because a caller was changed."""

from __future__ import annotations

import pytest
import torch
from helpers.kernels import KERNELS, count_kernel_calls

import atas
from atas.attacks import APGD, FAB, AttackEnsemble, Square
from atas.core.crop_shift import ShiftView, sample_shift
from atas.core.erasing import ErasedView, sample_erasure
from atas.data.loader import DeviceLoader, gather_views
from atas.evaluation import evaluate
from atas.methods.atas import adaptive_step_and_store
from atas.methods.base import projected_start
from atas.recipes import load

pytestmark = pytest.mark.gpu
ATTACK_KERNELS = {function for function in KERNELS if function.__module__.startswith("atas.attacks.")}


def shifted_and_erased(draw):
    """Views as `data.view = "cropshift"` and `data.erase` draw them."""
    return ErasedView.draw(draw, ShiftView.draw(draw, (32, 32), 10), (32, 32), 0.5)


def captured_step(name, views=None):
    """Capture and take a step of this method in epoch 6, in which ATAS adapts its steps."""
    from atas.training.cuda_graph_engine import CudaGraphEngine

    file = f"cifar10-preact-resnet18-{'plus-30s' if name == 'atas-plus' else name}"
    recipe = load(file).with_values({"training.batch_size": 32, "training.epochs": 9})
    device, log = torch.device("cuda"), []
    images, labels = torch.randint(256, (64, 3, 32, 32), dtype=torch.uint8), torch.randint(10, (64,))
    loader = DeviceLoader(images, labels, batch_size=32, pad=4, flip=True, seed=0, device=device, views=views)
    own = dict(recipe.method.settings) | ({"classes": 10} if atas.methods.takes_classes(name) else {})
    method = atas.methods.create(name, recipe.threat, 64, (3, 32, 32), pad=4, device=device, **own)
    engine = CudaGraphEngine(recipe, atas.models.create("preact-resnet18", 10).cuda(), method, loader, log=log.append)
    engine.start_epoch(6, 0)
    engine.step()
    assert not any("cannot" in line for line in log), log


def test_training_uses_every_kernel_of_training():
    with count_kernel_calls() as calls:
        for name in ("atas", "atas-plus", "atta", "fgsm-rs", "pgd"):
            captured_step(name)
        captured_step("atas", shifted_and_erased)
    assert {function.__name__ for function in set(KERNELS) - ATTACK_KERNELS - set(+calls)} == set()


def test_shifted_and_erased_views_leave_nothing_to_a_compiler(monkeypatch):
    monkeypatch.delattr(torch, "compile")
    with count_kernel_calls() as calls:
        captured_step("atas", shifted_and_erased)
    views = {sample_shift, sample_erasure, gather_views, projected_start, adaptive_step_and_store}
    assert views <= set(+calls)


def test_evaluation_uses_every_kernel_of_attacks():
    model = atas.models.create("preact-resnet18", 10).cuda().eval()
    x = torch.rand(64, 3, 32, 32, device="cuda")
    y = model(x).argmax(1)
    search = AttackEnsemble(
        "all", (APGD(loss="ce", iterations=3), APGD(loss="t", iterations=3), FAB(iterations=2), Square(queries=4))
    )
    with count_kernel_calls() as calls:
        evaluate(model, x, y, atas.Linf(0.001), attacks=["pgd10", search])
    assert {function.__name__ for function in ATTACK_KERNELS - set(+calls)} == set()
