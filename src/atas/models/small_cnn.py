"""A network for tiny images that trains in seconds on a CPU."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from atas.models.layers import Normalize


class SmallCNN(nn.Module):
    """Four 3x3 convolutions, 32-32-64-64 wide, each with BatchNorm and ReLU; for demonstrations and tests.

    From no paper. The third convolution has stride 2, a feature before the pooling sees 11x11 pixels, and
    the pooling is global, so anything from 8x8 digits to CIFAR's 32x32 will do. 66 thousand parameters,
    which start as PyTorch's defaults.
    """

    def __init__(self, num_classes: int, normalize: Normalize) -> None:
        super().__init__()
        self.normalize = normalize
        self.conv1 = nn.Conv2d(normalize.channels, 32, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(32)
        self.conv2 = nn.Conv2d(32, 32, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(32)
        self.conv3 = nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(64)
        self.conv4 = nn.Conv2d(64, 64, 3, padding=1, bias=False)
        self.bn4 = nn.BatchNorm2d(64)
        self.fc = nn.Linear(64, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of pixels in [0, 1]."""
        x = F.relu(self.bn1(self.conv1(self.normalize(x))))
        x = F.relu(self.bn2(self.conv2(x)))
        x = F.relu(self.bn3(self.conv3(x)))
        x = F.relu(self.bn4(self.conv4(x)))
        return self.fc(x.mean((2, 3)))
