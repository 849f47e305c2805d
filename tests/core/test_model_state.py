"""The state of a model: dense tensors, or a sentence before any work; and the mode, whatever `train` returns."""

import ast
from pathlib import Path

import pytest
import torch
from torch import nn

import atas
from atas.core.autograd import eval_mode
from atas.core.fingerprint import weights_hash
from atas.core.model_state import state_tensors
from atas.errors import UsageError


class WithExtra(nn.Linear):
    """A layer with a state besides its tensors."""

    extra = {"scale": 2}  # noqa: RUF012

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


class Silent(nn.Linear):
    """A layer whose `train` returns nothing, as many with frozen BatchNorm."""

    def train(self, mode=True):
        super().train(mode)


def with_buffer(buffer):
    model = nn.Linear(3, 2)
    model.register_buffer("extra", buffer)
    return model


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: WithExtra(3, 2), ("'_extra_state'", "a dict", "return a tensor from get_extra_state()")),
        (lambda: nn.Sequential(WithExtra(3, 2)), ("'0._extra_state'",)),
        (lambda: with_buffer(torch.eye(3).to_sparse()), ("'extra'", "a sparse coo tensor", "persistent=False")),
        (lambda: with_buffer(torch.eye(3).to_sparse_csr()), ("a sparse csr tensor",)),
        (
            lambda: with_buffer(torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8)),
            ("a quantized tensor",),
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_state_that_no_file_can_keep(make, parts):
    with pytest.raises(UsageError, match="cannot be saved") as caught:
        state_tensors(make())
    for part in parts:
        assert part in str(caught.value)


def test_a_tensor_as_extra_state_is_kept():
    model = WithExtra(3, 2)
    model.extra = torch.ones(2)
    assert list(state_tensors(model)) == ["weight", "bias", "_extra_state"]


def test_the_hash_of_sparse_weights_is_that_of_their_values():
    """A model with them can be evaluated."""
    dense, sparse = with_buffer(torch.eye(3)), with_buffer(torch.eye(3).to_sparse())
    sparse.load_state_dict(dense.state_dict() | {"extra": torch.eye(3).to_sparse()})
    assert weights_hash(dense) == weights_hash(sparse)


def test_a_model_whose_train_returns_nothing_stays_a_model():
    model = Silent(3, 2)
    assert model.eval() is None
    assert eval_mode(model.requires_grad_(True)) is model
    assert not model.training


@pytest.mark.slow
def test_nobody_uses_what_eval_and_train_return():
    """`nn.Module.eval` returns what `train` returns, which is None for models that forget to return themselves."""
    found = []
    package = Path(atas.__file__).parent
    for path in package.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        dropped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and id(node) not in dropped:
                of_module = isinstance(node.func.value, ast.Name) and node.func.value.id in ("atas", "training")
                if node.func.attr in ("eval", "train") and not of_module:
                    found.append(f"{path.relative_to(package)}:{node.lineno}")
    assert not found
