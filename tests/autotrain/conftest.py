"""Tiny data and networks, and the call with a fraction of a minute."""

import io

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

import atas
from atas.training import TrainingProgress

SECONDS = 1.5


class Tiny(nn.Module):
    """A convolution with BatchNorm and a linear layer."""

    def __init__(self, classes=10, channels=1):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(channels, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.fc = nn.Linear(8, classes)

    def forward(self, x):
        return self.fc(self.body(x).mean((2, 3)))


@pytest.fixture
def tiny_net():
    return Tiny


@pytest.fixture
def digits():
    """Images (N, 8, 8) of the first 400 digits with their labels, and of 60 others."""
    data = atas.data.load("digits")
    train, test = data.train.subset(slice(400)), data.test.subset(slice(60))
    return (train.images.numpy(), train.labels.numpy()), (test.images.numpy(), test.labels.numpy())


@pytest.fixture
def noise():
    """Images with random labels of two classes."""
    draw = np.random.default_rng(0)
    return draw.integers(256, size=(90, 1, 8, 8), dtype=np.uint8), draw.integers(2, size=90)


class Log:
    """A display that keeps its lines."""

    def __init__(self):
        self.out = io.StringIO()
        self.live = TrainingProgress(Console(file=self.out, width=500))

    @property
    def lines(self):
        return self.out.getvalue().splitlines()


@pytest.fixture
def log():
    return Log()


@pytest.fixture
def robustify(tmp_path, log, monkeypatch):
    """Call `atas.robustify` for a moment, into a folder of the test, and keep what it prints."""
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)

    def call(*arguments, **options):
        return atas.robustify(*arguments, **{"eps": 0.1, "minutes": SECONDS / 60, "live": log.live, **options})

    return call
