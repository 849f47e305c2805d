"""Targets of a teacher: equal to ADR's definition one image at a time, for the images that it was shown alone."""

import math

import pytest
import torch
from torch import nn

import atas
from atas.core.dispatch import use_fast_ops
from atas.errors import UsageError
from atas.methods import EMATeacher
from atas.training.build import build

SHAPE, EXAMPLES, CLASSES, EPOCHS = (3, 8, 10), 12, 4, 9
OWN = {"free": {"batch_size": 6, "replays": 2}, "yopo": {"outer": 2, "inner": 1}, "pgd": {"steps": 2}}
OWN["trades"] = OWN["mart"] = {"steps": 2}
NAMES = [name for name in atas.methods.names() if not atas.methods.get(name).own_targets]


def make(name="standard", **hyper):
    linf = atas.Linf(8 / 255)
    method = atas.methods.create(name, linf, EXAMPLES, SHAPE, pad=2, targets=EMATeacher(**hyper), **OWN.get(name, {}))
    method.start_epoch(0, EPOCHS)
    return method


def batch(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    logits, taught = (3 * torch.randn(6, CLASSES, generator=generator, dtype=dtype) for _ in range(2))
    return logits, taught, torch.arange(6) % CLASSES, torch.tensor([7, 1, 3, 5, 9, 11])


class Says(nn.Module):
    """A teacher with given logits."""

    def __init__(self, logits):
        super().__init__()
        self.logits = logits

    def forward(self, x):
        assert not self.training
        return self.logits


def anneal(first, last, epoch):
    return last + (first - last) * (1 + math.cos(math.pi * epoch / (EPOCHS - 1))) / 2


def expected_loss(logits, taught, y, epoch, smoothing):
    """ADR's rectified targets, image by image."""
    share, temperature, total = anneal(0.7, 0.95, epoch), anneal(2.5, 2.0, epoch), 0.0
    for row, teacher, label in zip(logits, taught, y.tolist(), strict=True):
        powers = [math.exp(float(value) / temperature) for value in teacher]
        q = [power / sum(powers) for power in powers]
        trust = min(max(share - (max(q) - q[label]), 0.0), 1.0)
        log_p = row - row.logsumexp(0)
        for c in range(CLASSES):
            hard = (1 - smoothing) * (c == label) + smoothing / CLASSES
            total = total - ((1 - trust) * hard + trust * q[c]) * log_p[c]
    return total / len(y)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_the_loss_equals_a_slow_reference(smoothing):
    method, (logits, taught, y, index) = make(smoothing=smoothing).double(), batch()
    logits.requires_grad_()
    taught[0, (y[0] + 1) % CLASSES] = 40.0  # sure of another class, so that it is not trusted at all
    for epoch in range(EPOCHS):
        method.start_epoch(epoch, EPOCHS)
        with method.teach(Says(taught), torch.rand(6, *SHAPE)):
            loss = method.loss(logits, y, index)
        expected = expected_loss(logits, taught, y, epoch, smoothing)
        torch.testing.assert_close(loss, expected, atol=1e-6, rtol=1e-6)
        gradients = [torch.autograd.grad(value, logits)[0] for value in (loss, expected)]
        torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_every_method_trains_with_a_teacher(small_net, make_images, name):
    """It moves the weights otherwise than the labels do, and the teacher stays as it was."""
    x, y, index = make_images(6, SHAPE), torch.arange(6) % CLASSES, torch.tensor([7, 1, 3, 5, 9, 11])
    weights, teacher = [], small_net().train()
    before = [tensor.clone() for tensor in teacher.state_dict().values()]
    for share in ((0.0, 0.0), (0.9, 0.9)):
        method, model = make(name, share=share), small_net().train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(2):
            with method.teach(teacher, x):
                method.step(model, optimizer, x, y, index)
        weights.append(model.fc.weight)
    assert not torch.equal(*weights)
    assert teacher.training
    assert all(map(torch.equal, before, teacher.state_dict().values()))
    assert not method.state_dict().keys() & {"targets.current_share", "targets.current_temperature"}


def test_the_teacher_of_a_run_is_its_first_average(monkeypatch):
    """On images as augmented, not as attacked."""
    taught = []
    whole = EMATeacher.teach

    def teach(self, teacher, x):
        taught.append((teacher, x.clone()))
        return whole(self, teacher, x)

    monkeypatch.setattr(EMATeacher, "teach", teach)
    values = {"training.ema": (0.5, 0.9), "targets.teacher_share": (0.7, 0.95), "training.epochs": 2, "data.pad": 0}
    recipe = atas.recipes.load("digits-small-cnn-atas").with_values(values | {"data.flip": False})
    data = atas.data.load("digits")
    few = atas.data.Dataset("digits", data.train.subset(slice(64)), data.test.subset(slice(20)))
    engine = build(recipe, few, atas.models.create("small-cnn", 10, 1), log=lambda text: None).engine
    taught.clear()  # of a trial step
    engine.start_epoch(0, 0)
    index = engine.loader.order(0)[: engine.loader.size(0)]
    engine.step()
    ((teacher, x),) = taught
    assert teacher is engine.averages[0.5].model
    assert torch.equal(x, few.train.images[index].float() / 255)


def test_predictions_are_those_of_the_batch():
    """Outside of the context, or for another number of images, nothing is taken from an earlier batch."""
    method, (logits, taught, y, index) = make(), batch()
    images, remedy = torch.rand(6, *SHAPE), r"compute the loss inside `with method\.teach\(teacher, x\):`"
    with method.teach(Says(taught), images):
        method.loss(logits, y, index)
        with pytest.raises(UsageError, match=remedy):
            method.loss(logits[:3], y[:3], index[:3])
    with pytest.raises(UsageError, match=remedy):
        method.loss(logits, y, index)


def test_wrong_settings_are_named():
    for wrong in ({"share": (0.5, 1.5)}, {"temperature": (0.0, 1.0)}):
        with pytest.raises(UsageError, match=r"shares in \[0, 1\] and temperatures above 0"):
            EMATeacher(**wrong)
    with pytest.raises(UsageError, match=r"start_epoch\(epoch, epochs=\.\.\.\)"):
        make().start_epoch(1)
    make(share=(0.5, 0.5), temperature=(1.0, 1.0)).start_epoch(1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at it itself
def test_compiled_targets_are_the_plain_ones():
    torch._dynamo.reset()
    losses, (logits, taught, y, index) = [], batch(torch.float32)
    for backend in (None, "aot_eager"):
        method = make(smoothing=0.1)
        with use_fast_ops(backend):
            for other in (taught, taught.roll(1)):
                with method.teach(Says(other), torch.rand(6, *SHAPE)):
                    losses.append(method.loss(logits, y, index))
    torch.testing.assert_close(losses[2:], losses[:2], atol=1e-6, rtol=1e-5)
