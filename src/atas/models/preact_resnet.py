"""PreActResNet-18 for small images."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from atas.models.layers import Normalize, spatial_mean


class PreActBlock(nn.Module):
    """A pre-activation block; its projecting shortcut takes the raw input, or the activated one."""

    def __init__(self, in_width: int, width: int, stride: int, activated_shortcut: bool = False) -> None:
        super().__init__()
        self.activated_shortcut = activated_shortcut
        self.bn1 = nn.BatchNorm2d(in_width)
        self.conv1 = nn.Conv2d(in_width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or in_width != width:
            self.shortcut = nn.Conv2d(in_width, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add the convolutions to the shortcut."""
        activated = F.relu(self.bn1(x))
        out = self.conv2(F.relu(self.bn2(self.conv1(activated))))
        projects = isinstance(self.shortcut, nn.Conv2d)
        return out + self.shortcut(activated if projects and self.activated_shortcut else x)


class PreActResNet(nn.Module):
    """PreActResNet-18 (He et al., Identity Mappings in Deep Residual Networks, ECCV 2016) for small images.

    Four stages of two blocks, 64 to 512 wide, on a 3x3 stem of stride 1 without BatchNorm or pooling. This
    is the "ResNet-18" of FGSM-RS, N-FGSM and ATAS on CIFAR: a projecting shortcut sees the raw input of its
    block, and BatchNorm and ReLU come before the last pooling. Other papers use other variants, so compare
    figures only within one. The pooling is global, so images may have any size; weights start as PyTorch's
    defaults.

    Args:
        num_classes: number of logits.
        normalize: the first layer.
        activated_shortcut: a projecting shortcut sees the activated input, as in SSAT and YOPO.
        last_bn: BatchNorm and ReLU come before the pooling; SSAT, YOPO and GradAlign have none there.
        he_init: weights start from normal distributions of variance 2 / fan-out (convolutions) and 2 / fan-in
            (the last layer, with a bias of 0), as in GradAlign.
    """

    window: int | None = None
    """Pool at most the first `window` rows and columns."""

    def __init__(
        self,
        num_classes: int,
        normalize: Normalize,
        activated_shortcut: bool = False,
        last_bn: bool = True,
        he_init: bool = False,
    ) -> None:
        super().__init__()
        self.normalize = normalize
        self.activated_shortcut = activated_shortcut
        self.conv1 = nn.Conv2d(normalize.channels, 64, 3, padding=1, bias=False)
        self.layer1 = _stage(64, 64, 1, activated_shortcut)
        self.layer2 = _stage(64, 128, 2, activated_shortcut)
        self.layer3 = _stage(128, 256, 2, activated_shortcut)
        self.layer4 = _stage(256, 512, 2, activated_shortcut)
        self.bn = nn.BatchNorm2d(512) if last_bn else None
        self.fc = nn.Linear(512, num_classes)
        if he_init:
            self.apply(_init_he)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of pixels in [0, 1]."""
        x = self.conv1(self.normalize(x))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(spatial_mean(x if self.bn is None else F.relu(self.bn(x)), self.window))


def _stage(in_width: int, width: int, stride: int, activated_shortcut: bool) -> nn.Sequential:
    first = PreActBlock(in_width, width, stride, activated_shortcut)
    return nn.Sequential(first, PreActBlock(width, width, 1, activated_shortcut))


def _init_he(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    elif isinstance(module, nn.Linear):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        nn.init.zeros_(module.bias)
