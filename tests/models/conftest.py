"""What the tests of single networks share: layers as plain functions of a state dict."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn


class Functional:
    """A network's tensors and the operations on them, with none of its modules; `name` begins a key."""

    def __init__(self, state):
        self.state = state

    def conv(self, name, x, stride=1, padding=0):
        return F.conv2d(x, self.state[name + ".weight"], stride=stride, padding=padding)

    def bn(self, name, x):
        keys = ("running_mean", "running_var", "weight", "bias")
        return F.batch_norm(x, *(self.state[f"{name}.{key}"] for key in keys), eps=1e-5)

    def bn_relu(self, name, x):
        return F.relu(self.bn(name, x))

    def head(self, x):
        return F.linear(x.mean((2, 3)), self.state["fc.weight"], self.state["fc.bias"])

    def normalize(self, x, mean, std):
        return (x - torch.tensor(mean).double().view(-1, 1, 1)) / torch.tensor(std).double().view(-1, 1, 1)

    def __contains__(self, name):
        return name + ".weight" in self.state


@pytest.fixture
def functional():
    """Put a model in float64 and eval mode, give it telling BatchNorms, and take its tensors."""

    def prepare(model):
        generator = torch.Generator().manual_seed(1)
        model.double().eval()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                    tensor.data.uniform_(0.5, 1.5, generator=generator)
        return Functional(model.state_dict())

    return prepare
