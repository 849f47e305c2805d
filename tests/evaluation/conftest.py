import copy

import pytest
import torch

import atas
from atas.attacks import APGD, FAB, AttackEnsemble, Square
from atas.evaluation import evaluate


@pytest.fixture(scope="session")
def images():
    """Thirty small uint8 images."""
    return torch.randint(256, (30, 3, 6, 5), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)


@pytest.fixture(scope="session")
def make_problem(small_net, images):
    """Make a model and data on which clean accuracy is high and attacks of 4/255 break about half."""

    def make():
        model = small_net(seed=1, sharpness=20.0).eval()
        x = images.float() / 255
        with torch.no_grad():
            model.fc.bias -= model(x).mean(0)  # so that every class is predicted
            y = model(x).argmax(1)
        y[:3] = (y[:3] + 1) % 4
        return model, x, y

    return make


@pytest.fixture
def problem(make_problem):
    """A model and data of the test's own."""
    return make_problem()


@pytest.fixture(scope="session")
def ball():
    return atas.Linf(4 / 255)


@pytest.fixture(scope="session")
def evaluated(make_problem, ball):
    """The result of an evaluation; not to be changed."""
    return evaluate(*make_problem(), ball, attacks=("fgsm", "pgd10"), batch_size=8, seed=2)


@pytest.fixture
def result(evaluated):
    """The result of an evaluation to do things to."""
    return copy.deepcopy(evaluated)


@pytest.fixture(scope="session")
def quick():
    """AutoAttack's four searches with a small part of the work."""
    return AttackEnsemble(
        "quick",
        (APGD(loss="ce", iterations=50), APGD(loss="t", iterations=20), FAB(iterations=20), Square(queries=300)),
    )


@pytest.fixture(scope="session")
def tiny():
    """Four searches with hardly any work."""
    return AttackEnsemble(
        "tiny", (APGD(loss="ce", iterations=8), APGD(loss="t", iterations=8), FAB(iterations=5), Square(queries=20))
    )
