"""PreActResNet-18 whose BatchNorm normalises a batch in four chunks, as training on four GPUs with DataParallel does.

In train mode each chunk is normalised by its own statistics, and the running statistics follow the first chunk. In eval
mode nothing changes. From the root of the repository:

    atas reproduce table-cifar10 --methods atas --networks preact-resnet18 --eps 8/255 \\
        --out results/cifar10/chunked-batchnorm \\
        --set model.name=benchmarks.chunked_batchnorm:preact_resnet18 --set model.mean=none --set model.std=none
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atas import models

CHUNKS = 4


class ChunkedBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm over each chunk of a batch; its state dict is that of `nn.BatchNorm2d`."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise every chunk by its own statistics, in eval mode by the running ones."""
        if not self.training:
            return super().forward(x)
        first, *others = x.chunk(CHUNKS)
        normalised = [super().forward(first)]
        normalised += [F.batch_norm(part, None, None, self.weight, self.bias, True, 0.0, self.eps) for part in others]
        return torch.cat(normalised)


def preact_resnet18(num_classes: int, channels: int) -> nn.Module:
    """Return the network of the recipes with chunked BatchNorm; initial weights are the same for a seed."""
    model = models.create("preact-resnet18", num_classes, channels)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, ChunkedBatchNorm2d(child.num_features))
    return model
