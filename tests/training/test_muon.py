"""Muon: equal to a slow reference by singular values, in every engine and across a resume."""

import pytest
import torch
from torch import nn

from atas.recipes import OptimizerConfig
from atas.training import checkpoint
from atas.training.build import build
from atas.training.optim import SGD, Muon, orthogonalize
from atas.training.trainer import Interrupted

MUON = {"optimizer.name": "muon", "optimizer.matrix_rate": 0.5, "schedule.name": "cyclic", "schedule.peak": 0.2}
RATE, MOMENTUM = 0.1, 0.8


def by_singular_values(matrix, steps=5):
    """What `orthogonalize` is by definition: the polynomial of each singular value, over that of their norm."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    for _ in range(steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ values.diag() @ right


@pytest.mark.parametrize("shape", [(2, 5, 5), (3, 4, 9), (1, 9, 4), (2, 1, 6)])
def test_orthogonalized_matrices_keep_their_singular_vectors(shape, generator):
    matrices = torch.randn(shape, generator=generator, dtype=torch.float64)
    found = orthogonalize(matrices)
    for matrix, result in zip(matrices, found, strict=True):
        torch.testing.assert_close(result, by_singular_values(matrix))
    values = torch.linalg.svdvals(orthogonalize(torch.randn(20, 32, 64, generator=generator)))
    assert 0.6 < float(values.min()) < float(values.max()) < 1.3


def test_zeros_stay_zeros():
    assert torch.equal(orthogonalize(torch.zeros(1, 3, 4)), torch.zeros(1, 3, 4))


@pytest.mark.parametrize("matrix_rate", [None, 0.3])
def test_steps_equal_a_slow_reference(matrix_rate, generator):
    """Two convolutions of one shape and one of another; a linear layer and a bias are updated by SGD."""
    shapes = (4, 3, 3, 3), (6, 4), (4, 3, 3, 3), (8, 4, 1, 1), (6,)
    first = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    config = OptimizerConfig(name="muon", matrix_rate=matrix_rate, weight_decay=0.05)
    ours, sgd = [weight.clone() for weight in first], [weight.clone() for weight in first]
    slow, momenta = [weight.clone() for weight in first], [torch.zeros_like(weight) for weight in first]
    muon, plain = Muon(config, ours, ours), SGD(config, sgd, sgd)
    for _ in range(3):
        gradients = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        for optimizer in (muon, plain):
            optimizer.step(gradients, torch.tensor(RATE), torch.tensor(MOMENTUM))
        for row, gradient in enumerate(gradients):
            momenta[row] = MOMENTUM * momenta[row] + gradient
            step = by_singular_values((gradient + MOMENTUM * momenta[row]).flatten(1)) if gradient.dim() > 1 else None
            if gradient.dim() == 4:
                norm = first[row].norm()
                moved = slow[row].flatten(1) - RATE * (matrix_rate or 0.1) * norm * step / step.norm()
                slow[row] = (moved * norm / moved.norm()).view_as(slow[row])
    for row, weight in enumerate(ours):
        torch.testing.assert_close(weight, slow[row] if weight.dim() == 4 else sgd[row])


def test_what_has_no_gradient_or_starts_at_zero(generator):
    """A convolution without a gradient stays; one of zeros, which has no norm to keep, is updated by SGD."""
    weights = [torch.ones(2, 2, 1, 1), torch.zeros(2, 2, 1, 1), torch.ones(2, 2, 1, 1)]
    gradients = [None, torch.ones(2, 2, 1, 1), torch.randn(2, 2, 1, 1, generator=generator)]
    config = OptimizerConfig(name="muon", weight_decay=0.0)
    Muon(config, weights, weights).step(gradients, torch.tensor(RATE), torch.tensor(MOMENTUM))
    assert torch.equal(weights[0], torch.ones(2, 2, 1, 1))
    torch.testing.assert_close(weights[1], torch.full((2, 2, 1, 1), -RATE))
    assert not torch.equal(weights[2], torch.ones(2, 2, 1, 1))
    assert float(weights[2].norm()) == pytest.approx(2.0)


def test_a_gradient_of_zero_moves_nothing():
    weights = [torch.ones(2, 2, 1, 1)]
    Muon(OptimizerConfig(name="muon"), weights, weights).step([torch.zeros(2, 2, 1, 1)], *torch.tensor([RATE, 0.0]))
    torch.testing.assert_close(weights[0], torch.ones(2, 2, 1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["atas", "free"])
def test_a_resume_gives_the_same_bits(method, tmp_path, train_toy, interrupt_after, assert_same_run):
    values = MUON | {"training.ema": 0.9}
    train_toy(tmp_path / "whole", method, values)
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "parts", method, values, live=interrupt_after(5))
    train_toy(tmp_path / "parts", method, values, resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    tensors, _ = checkpoint.load(tmp_path / "whole" / "checkpoints" / "last.safetensors")
    assert {name.partition(".")[0] for name in tensors} >= {"momentum", "norms"}


def test_low_precision_copies_follow(toy_recipe, toy_data, tiny_net):
    net = tiny_net()
    before = {name: float(weight.detach().norm()) for name, weight in net.named_parameters() if weight.dim() == 4}
    engine = build(toy_recipe("atas", MUON | {"engine.precision": "bf16"}), toy_data, net, log=lambda text: None).engine
    assert before
    engine.start_epoch(0, 0)
    for _ in range(len(engine.loader)):
        engine.step()
    for weight, copied in zip(engine.model.parameters(), engine.compute_model.parameters(), strict=True):
        assert torch.equal(weight.to(copied.dtype), copied)
    for name, weight in engine.model.named_parameters():
        if name in before:
            assert float(weight.detach().norm()) == pytest.approx(before[name], rel=1e-4)


def test_channels_last_weights_move_alike(generator):
    """A layout of the memory changes nothing."""
    first = nn.Conv2d(3, 4, 3).weight.detach()
    both = [first.clone()], [first.clone().to(memory_format=torch.channels_last)]
    gradient = torch.randn(first.shape, generator=generator)
    for weights in both:
        Muon(OptimizerConfig(name="muon"), weights, weights).step([gradient], *torch.tensor([RATE, MOMENTUM]))
    torch.testing.assert_close(both[0][0], both[1][0])
    assert both[1][0].is_contiguous(memory_format=torch.channels_last)
