"""Image classifiers that take pixels in [0, 1], NCHW, normalise them inside, and return logits.

>>> model = create("small-cnn", num_classes=10, channels=1)
>>> model.normalize.mean.flatten().tolist(), model.normalize.std.flatten().tolist()
([0.5], [0.25])
"""

from atas.models.layers import Normalize
from atas.models.preact_resnet import PreActResNet
from atas.models.registry import create, names
from atas.models.wide_resnet import WideResNet

__all__ = ["Normalize", "PreActResNet", "WideResNet", "create", "names"]
