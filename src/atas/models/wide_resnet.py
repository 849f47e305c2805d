"""Wide ResNets for small images."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from atas.models.layers import Normalize, spatial_mean


class WideBlock(nn.Module):
    """A pre-activation block; a projection shortcut takes the activated input."""

    def __init__(self, in_width: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(in_width)
        self.conv1 = nn.Conv2d(in_width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.shortcut = None if in_width == width else nn.Conv2d(in_width, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add the convolutions to the shortcut."""
        activated = F.relu(self.bn1(x))
        out = self.conv2(F.relu(self.bn2(self.conv1(activated))))
        return out + (x if self.shortcut is None else self.shortcut(activated))


class WideResNet(nn.Module):
    """Wide ResNet (Zagoruyko and Komodakis, BMVC 2016) as adversarial training uses it since TRADES.

    Three stages of `(depth - 4) / 6` pre-activation blocks, `16 * width` to `64 * width` channels wide,
    without dropout. A projecting shortcut sees the activated input of its block, unlike in our
    PreActResNet-18. TRADES's own code also carries an unused copy of the first stage, which is left out
    here: 28-10 has 36.5M parameters for 10 classes. The pooling is global, so images may have any size.
    Convolutions start with variance 2 / fan-out, the last bias at 0, the rest as PyTorch's defaults.
    """

    window: int | None = None
    """Pool at most the first `window` rows and columns."""

    def __init__(self, num_classes: int, normalize: Normalize, depth: int, width: int) -> None:
        super().__init__()
        blocks = (depth - 4) // 6
        self.normalize = normalize
        self.conv1 = nn.Conv2d(normalize.channels, 16, 3, padding=1, bias=False)
        self.layer1 = _stage(16, 16 * width, blocks, stride=1)
        self.layer2 = _stage(16 * width, 32 * width, blocks, stride=2)
        self.layer3 = _stage(32 * width, 64 * width, blocks, stride=2)
        self.bn = nn.BatchNorm2d(64 * width)
        self.fc = nn.Linear(64 * width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of pixels in [0, 1]."""
        x = self.conv1(self.normalize(x))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(spatial_mean(F.relu(self.bn(x)), self.window))


def _stage(in_width: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    first = WideBlock(in_width, width, stride)
    return nn.Sequential(first, *(WideBlock(width, width, stride=1) for _ in range(blocks - 1)))
