"""PreActResNet-18 for small images."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from atas.models.layers import Normalize, spatial_mean


class PreActBlock(nn.Module):
    """A pre-activation block; its shortcut takes the raw input."""

    def __init__(self, in_width: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_width)
        self.conv1 = nn.Conv2d(in_width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_width != width:
            self.shortcut = nn.Conv2d(in_width, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add the convolutions to the shortcut."""
        out = self.conv1(F.relu(self.bn1(x)))
        out = self.conv2(F.relu(self.bn2(out)))
        return out + self.shortcut(x)


class PreActResNet(nn.Module):
    """PreActResNet-18 (He et al., Identity Mappings in Deep Residual Networks, ECCV 2016) for small images.

    Four stages of two blocks, 64 to 512 wide, on a 3x3 stem of stride 1 without BatchNorm or pooling. This
    is the "ResNet-18" of FGSM-RS, N-FGSM and ATAS on CIFAR: a projecting shortcut sees the raw input of its
    block, and BatchNorm and ReLU come before the last pooling. Other papers let the shortcut see the
    activated input (Robust Overfitting, YOPO, SSAT), leave out the last BatchNorm (GradAlign, YOPO), or use
    the post-activation ResNet-18, so compare figures only within a variant. The pooling is global, so
    images may have any size; weights start as PyTorch's defaults.
    """

    window: int | None = None
    """Pool at most the first `window` rows and columns."""

    def __init__(self, num_classes: int, normalize: Normalize) -> None:
        super().__init__()
        self.normalize = normalize
        self.conv1 = nn.Conv2d(normalize.channels, 64, 3, padding=1, bias=False)
        self.layer1 = _stage(64, 64, stride=1)
        self.layer2 = _stage(64, 128, stride=2)
        self.layer3 = _stage(128, 256, stride=2)
        self.layer4 = _stage(256, 512, stride=2)
        self.bn = nn.BatchNorm2d(512)
        self.fc = nn.Linear(512, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of pixels in [0, 1]."""
        x = self.conv1(self.normalize(x))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(spatial_mean(F.relu(self.bn(x)), self.window))


def _stage(in_width: int, width: int, stride: int) -> nn.Sequential:
    return nn.Sequential(PreActBlock(in_width, width, stride), PreActBlock(width, width, stride=1))
