"""Image classifiers that take pixels in [0, 1], NCHW, normalise them inside, and return logits.

>>> model = create("small-cnn", num_classes=10, channels=1)
>>> model.normalize.mean.flatten().tolist(), model.normalize.std.flatten().tolist()
([0.5], [0.25])
"""

from atas.models._create import create, names
from atas.models._normalize import Normalize
from atas.models._preact_resnet import PreActResNet
from atas.models._wide_resnet import WideResNet

__all__ = ["Normalize", "PreActResNet", "WideResNet", "create", "names"]
