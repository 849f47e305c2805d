"""ResNet-18 and ResNet-50 for images of ImageNet's size."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atas.models.layers import Normalize

# The names and order of sub-modules in this file are those of torchvision's published weights.


class Stem(nn.Conv2d):
    """ImageNet's first convolution: 7x7 with stride 2, three channels in.

    On a GPU it runs as a 4x4 convolution without a stride over the image folded to half its sides: every 2x2 pixels
    become one with four times the channels. The sums are the same, but tensor cores want more than three channels:
    there and back it takes less than half the time (docs/performance.md).
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__(channels, width, 7, stride=2, padding=3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The convolution, folded on a GPU where both sides are even."""
        even = x.shape[2] % 2 == 0 and x.shape[3] % 2 == 0
        return self.folded(x) if x.is_cuda and even else super().forward(x)

    def folded(self, x: Tensor) -> Tensor:
        """The same by way of folded pixels: the kernel gets a row and a column of zeros to be 8x8."""
        return F.conv2d(fold(F.pad(x, (4, 2, 4, 2))), fold(F.pad(self.weight, (1, 0, 1, 0))))


def fold(x: Tensor) -> Tensor:
    """Every 2x2 pixels as one with four times the channels, and zeros up to a multiple of eight of them.

    >>> fold(torch.ones(1, 3, 6, 4)).shape
    torch.Size([1, 16, 3, 2])
    """
    folded = F.pixel_unshuffle(x, 2)
    return F.pad(folded, (0, 0, 0, 0, 0, -folded.shape[1] % 8)).contiguous(memory_format=torch.channels_last)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions, the first with the stride."""

    expansion = 1

    def __init__(self, in_width: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_width, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _downsample(in_width, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, after its last ReLU."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions; the 3x3 has the stride, in the paper the first 1x1."""

    expansion = 4

    def __init__(self, in_width: int, width: int, stride: int) -> None:
        super().__init__()
        out_width = self.expansion * width
        self.conv1 = nn.Conv2d(in_width, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_width)
        self.downsample = _downsample(in_width, out_width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, after its last ReLU."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """ResNet (He et al., Deep Residual Learning for Image Recognition, CVPR 2016) with ImageNet's stem.

    A 7x7 convolution of stride 2 and a max-pool reduce the image fourfold before the first stage. ResNet-50
    is the variant called v1.5, with the stride in the 3x3 convolution. Apart from `normalize`, the names
    and shapes of the state dict are torchvision's, so its published weights load; the initialisation is
    torchvision's too (convolutions of variance 2 / fan-out).
    """

    def __init__(
        self,
        num_classes: int,
        normalize: Normalize,
        block: type[BasicBlock] | type[Bottleneck],
        blocks: tuple[int, int, int, int],
    ) -> None:
        super().__init__()
        self.normalize = normalize
        self.conv1 = Stem(normalize.channels, 64)
        self.bn1 = nn.BatchNorm2d(64)
        self.layer1 = _stage(block, 64, 64, blocks[0], stride=1)
        self.layer2 = _stage(block, 64 * block.expansion, 128, blocks[1], stride=2)
        self.layer3 = _stage(block, 128 * block.expansion, 256, blocks[2], stride=2)
        self.layer4 = _stage(block, 256 * block.expansion, 512, blocks[3], stride=2)
        self.fc = nn.Linear(512 * block.expansion, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Logits of pixels in [0, 1]."""
        x = F.relu(self.bn1(self.conv1(self.normalize(x))))
        x = F.max_pool2d(x, kernel_size=3, stride=2, padding=1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(x.mean((2, 3)))


def _downsample(in_width: int, out_width: int, stride: int) -> nn.Sequential | None:
    if stride == 1 and in_width == out_width:
        return None
    return nn.Sequential(nn.Conv2d(in_width, out_width, 1, stride, bias=False), nn.BatchNorm2d(out_width))


def _stage(
    block: type[BasicBlock] | type[Bottleneck], in_width: int, width: int, blocks: int, stride: int
) -> nn.Sequential:
    first = block(in_width, width, stride)
    return nn.Sequential(first, *(block(width * block.expansion, width, stride=1) for _ in range(blocks - 1)))
