"""What all tests share: one thread, fixed seeds, small networks, and a visible skip where there is no GPU."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch.cuda.is_available() is False here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


class SmallNet(nn.Module):
    """Two convolutions and a linear layer; smooth unless told otherwise, so that no gradient is zero by accident."""

    def __init__(self, channels=3, classes=4, batch_norm=True, activation=F.softplus):
        super().__init__()
        norm = nn.BatchNorm2d if batch_norm else nn.Identity
        self.conv1, self.bn1 = nn.Conv2d(channels, 6, 3, padding=1), norm(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 8, 3, stride=2, padding=1), norm(8)
        self.fc = nn.Linear(8, classes)
        self.activation = activation

    def forward(self, x):
        x = self.activation(self.bn1(self.conv1(x)))
        x = self.activation(self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


def make_net(*, seed=0, sharpness=1.0, **options):
    """A small network of that seed whose statistics are not the initial ones; `sharpness` scales its logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = SmallNet(**options)
    net.fc.weight.data.mul_(sharpness)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.running_var):
                tensor.data.uniform_(0.5, 1.5, generator=generator)
            for tensor in (module.bias, module.running_mean):
                tensor.data.uniform_(-0.5, 0.5, generator=generator)
    return net


@pytest.fixture(autouse=True)
def _seeded():
    """Every test begins with the same global random state."""
    torch.manual_seed(0)


@pytest.fixture
def generator():
    """A generator of the test's own."""
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session")
def small_net():
    """Make small networks: `small_net(batch_norm=False, sharpness=4.0)`."""
    return make_net


@pytest.fixture(scope="session")
def robust_digits():
    """A small network, trained on the digits for two seconds to withstand some of it; and 200 images it has not seen.

    Whoever changes the network puts it back.
    """
    from atas import attacks, data
    from atas.threat import Linf

    torch.manual_seed(0)
    digits = data.load("digits")
    x, y = digits.train.images.float() / 255, digits.train.labels
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), 4e-3)
    for epoch in range(6):
        for batch in torch.randperm(len(x)).split(64):
            point = attacks.pgd(model, x[batch], y[batch], Linf(0.15), 2, 0.1, seed=epoch, index=batch)
            optimizer.zero_grad()
            F.cross_entropy(model(point), y[batch]).backward()
            optimizer.step()
    return model.eval().requires_grad_(False), digits.test.images[:200].float() / 255, digits.test.labels[:200]


@pytest.fixture(scope="session")
def make_images():
    """Make float images whose pixels lie in [0, 1] and, one in four, on its ends."""

    def make(count, shape=(3, 8, 10), seed=0, dtype=torch.float32):
        images = torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return (images * 4 / 3 - 1 / 6).clamp(0, 1).to(dtype)

    return make
