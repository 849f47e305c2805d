"""What is tried before a training begins: a whole step, in its precision and with all derivatives of its method."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import atas
from atas.errors import UsageError
from atas.training.build import build


class Attention(nn.Module):
    """Rows of an image attend to each other; heads so wide that torch prefers a fused kernel."""

    def __init__(self):
        super().__init__()
        self.rows, self.head = nn.Linear(8, 48), nn.Linear(16, 3)

    def forward(self, x):
        query, key, value = self.rows(x.flatten(1, 2)).unsqueeze(1).chunk(3, -1)
        return self.head(F.scaled_dot_product_attention(query, key, value).squeeze(1).mean(1))


class Once(torch.autograd.Function):
    """An operation with a first derivative alone."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        return gradient * 2


class OnlyFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 3)

    def forward(self, x):
        return self.linear(Once.apply(x.flatten(1)).sigmoid())


class TwoWays(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 3), nn.Linear(64, 3)

    def forward(self, x):
        return self.first(x.flatten(1)) + self.second(x.flatten(1))


def test_gradient_alignment_trains_attention(tmp_path, train_toy):
    run = train_toy(tmp_path / "run", "fgsm-ga", {"training.epochs": 1}, model=Attention())
    assert all(weight.isfinite().all() for weight in run.model.parameters())


@pytest.mark.parametrize(
    ("model", "method", "said"),
    [
        (OnlyFirst, "fgsm-ga", "gradient alignment needs a second derivative, which an operation of this model lacks"),
        (TwoWays, "yopo", "'first' alone, because the network also sees the images past it"),
    ],
)
def test_a_step_is_tried_before_the_folder_is_begun(model, method, said, tmp_path, train_toy):
    with pytest.raises(UsageError, match=said) as caught:
        train_toy(tmp_path / "run", method, model=model())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


class TooLarge(TwoWays):
    def forward(self, x):
        raise RuntimeError("could not create a primitive")  # how oneDNN says that memory has run out


def test_a_lack_of_memory_is_not_taken_for_a_fault_of_the_network(tmp_path, train_toy):
    with pytest.raises(RuntimeError, match="could not create a primitive"):
        train_toy(tmp_path / "run", model=TooLarge())


class OneSize(nn.Module):
    """Takes images of 8 x 8 alone, as vision transformers often do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 3)

    def forward(self, x):
        assert x.shape[2:] == (8, 8), "only 8 x 8"
        return self.linear(x.flatten(1))


def test_a_network_for_one_size_does_not_begin_with_smaller_views(tmp_path, train_toy):
    views = {"data.view": "crop", "data.view_size": 8, "data.pad": 0, "method.grid": 4, "training.epochs": 1}
    train_toy(tmp_path / "whole", values=views, model=OneSize())
    with pytest.raises(UsageError, match=r"images of 6 x 6, as the training shows them first \(only 8 x 8\)"):
        train_toy(tmp_path / "run", values=views | {"data.view_start": 6, "data.view_ramp": 0.5}, model=OneSize())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", atas.methods.names())
def test_trying_a_step_leaves_no_trace(name, toy_data, toy_recipe, tiny_net):
    model = nn.Sequential(tiny_net(), nn.Dropout()).train()
    model[0].bn1.eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    engine = build(toy_recipe(name), toy_data, model).engine
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert (model.training, model[0].bn1.training, model[0].bn2.training) == (True, False, True)
    assert int(engine.method.epoch) == -1


PROGRAM = """
    import sys, warnings
    warnings.filterwarnings("ignore", "`torch.nn.utils.weight_norm` is deprecated")
    import torch
    from torch import nn
    import atas
    from atas.errors import UsageError

    class Lipschitz(nn.Conv2d):
        def forward(self, x):
            weight = self.weight / torch.linalg.matrix_norm(self.weight.flatten(1), 2)
            return self._conv_forward(x, weight, self.bias)

    class InLowPrecision(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(64, 3)

        def forward(self, x):
            x = self.linear(x.flatten(1))
            return torch.complex(x, x).abs()

    CONVS = {
        "spectral_norm": lambda: nn.utils.spectral_norm(nn.Conv2d(1, 4, 3)),
        "parametrized": lambda: nn.utils.parametrizations.spectral_norm(nn.Conv2d(1, 4, 3)),
        "weight_norm": lambda: nn.utils.weight_norm(nn.Conv2d(1, 4, 3)),
        "lipschitz": lambda: Lipschitz(1, 4, 3),
    }
    images, labels = torch.randint(0, 256, (40, 1, 8, 8), dtype=torch.uint8), torch.arange(40) % 3
    data = atas.data.from_arrays("toy", images, labels, images, labels)
    folder = sys.argv[1]
    values = {
        "engine.precision": "bf16", "training.epochs": 1, "training.batch_size": 8, "training.probe": 8,
        "data.pad": 1, "model.mean": 0.5, "model.std": 0.5,
    }

    def train(name, model):
        return atas.train("digits-small-cnn-atas", out=f"{folder}/{name}", values=values, model=model, data=data)

    for name, conv in CONVS.items():
        model = nn.Sequential(conv(), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
        run = train(name, model)
        assert all(tensor.isfinite().all() for tensor in run.model.state_dict().values()), name
    try:
        train("refused", InLowPrecision())
    except UsageError as error:
        print(error)
"""


@pytest.mark.slow
def test_layers_that_compute_with_their_weights_train_in_bf16(tmp_path):
    """In a process of its own: bf16 convolutions need a setting of oneDNN before torch is imported."""
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "a training step of ATAS in bf16 fails on this model: " in done.stdout
    assert "; set engine.precision=float32" in done.stdout
    assert not (tmp_path / "refused").exists()
