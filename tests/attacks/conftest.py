import pytest
import torch

from atas import threat


@pytest.fixture(params=[("linf", 8 / 255), ("linf", 0.3), ("l2", 0.5)], ids=["linf-8", "linf-0.3", "l2-0.5"])
def ball(request):
    """A threat model of either norm."""
    return threat.create(*request.param)


@pytest.fixture
def labels():
    """Make labels of four classes."""

    def make(count, classes=4, seed=1):
        return torch.randint(classes, (count,), generator=torch.Generator().manual_seed(seed))

    return make
