"""The small network of the demonstration."""

import pytest
import torch
import torch.nn.functional as F

from atas import models


def test_forward_equals_an_independent_computation(functional):
    torch.manual_seed(0)
    model = models.create("small-cnn", 10, channels=1)
    net = functional(model)
    x = torch.rand(2, 1, 8, 8, dtype=torch.float64)

    out = net.normalize(x, 0.5, 0.25)
    for i in (1, 2, 3, 4):
        out = net.bn_relu(f"bn{i}", net.conv(f"conv{i}", out, stride=2 if i == 3 else 1, padding=1))
    assert out.shape == (2, 64, 4, 4)
    torch.testing.assert_close(model(x), net.head(out))


@pytest.mark.slow
def test_it_learns_where_a_bar_runs():
    torch.manual_seed(0)
    position = torch.arange(8)
    rows = torch.zeros(8, 1, 8, 8)
    rows[position, :, position] = 1.0
    images = torch.cat([rows, rows.transpose(2, 3)])
    labels = torch.tensor([0] * 8 + [1] * 8)
    model = models.create("small-cnn", 2, channels=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(30):
        optimizer.zero_grad()
        F.cross_entropy(model(images + 0.2 * torch.rand_like(images)), labels).backward()
        optimizer.step()
    assert (model.eval()(images).argmax(1) == labels).all()
