"""Small networks of every kind that people bring, each with what is expected of it.

All take images (N, 1, 8, 8) and have three classes. A `Kind` works in every activity but those that it `refuses`, with
a sentence that matches.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

SHAPE, CLASSES = (1, 8, 8), 3
METHODS = ("atas", "pgd", "trades", "free", "fgsm-ga", "yopo")
GRAPHS = ("torch-export", "onnx")
ACTIVITIES = (*METHODS, "evaluate", "train", "safetensors", *GRAPHS)


def conv(*middle: nn.Module) -> nn.Sequential:
    """A convolution of four channels, these layers, and a classifier."""
    ends = nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES)
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), *middle, nn.Softplus(), *ends)


def with_first(change: Callable[[nn.Module], nn.Module]) -> nn.Sequential:
    """A network whose first convolution is changed by a function, and followed by another one."""
    first = change(nn.Conv2d(1, 4, 3, padding=1))
    ends = nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES)
    return nn.Sequential(first, nn.Softplus(), nn.Conv2d(4, 4, 3), nn.Softplus(), *ends)


class Own(nn.Module):
    """A convolution and a classifier, for networks with a forward of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.fc(F.softplus(self.conv(x)).mean((2, 3)))


class Contiguous(Own):
    """Asserts that images have the strides of a new tensor."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        assert x.stride() == (64, 64, 8, 1), x.stride()
        return super().forward(x)


class Viewing(Own):
    """LeNet's usual end: `view` behind a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(256, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        x = F.softplus(self.conv(x))
        return self.fc(x.view(x.shape[0], -1))


class Rows(nn.Module):
    """A recurrent network over the rows of an image."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.rnn, self.fc = kind(8, 8, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.fc(self.rnn(x.squeeze(1))[0][:, -1])


class Encoder(nn.Module):
    """A transformer over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, activation="gelu", batch_first=True)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.fc(self.encoder(self.embed(x.squeeze(1))).mean(1))


class Attention(nn.Module):
    """Attention over rows by PyTorch's fused function."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.fc = nn.Linear(8, 8), nn.Linear(8, 24), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        x = self.embed(x.squeeze(1))
        query, key, value = self.qkv(x).reshape(x.shape[0], 8, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value)
        return self.fc((x + attended.transpose(1, 2).reshape(x.shape)).mean(1))


class LipschitzConv(nn.Conv2d):
    """A convolution that divides by the spectral norm of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the output."""
        return super().forward(x) / torch.linalg.matrix_norm(self.weight.flatten(1), 2)


class Tied(nn.Module):
    """Two layers with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward, self.fc = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, CLASSES)
        self.outward.weight = self.inward.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.fc(torch.tanh(self.outward(torch.tanh(self.inward(x.flatten(1))))))


class FrozenNorm(nn.Module):
    """Keeps BatchNorm in eval mode by a `train` that returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.net = conv(nn.BatchNorm2d(4))

    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        """Set the mode."""
        super().train(mode)
        self.net[1].eval()

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.net(x)


class ExtraState(Own):
    """Has state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        """Return the state."""
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Take the state."""
        assert state == {"version": 3}


class SparseBuffer(nn.Module):
    """Mixes pixels by a sparse matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mix", torch.eye(64).to_sparse())
        self.fc = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return self.fc(torch.sparse.mm(self.mix, x.flatten(1).T).T)


class Complex(nn.Module):
    """Has complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, CLASSES, dtype=torch.complex64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return (x.flatten(1).to(torch.complex64) @ self.weight).abs()


class Double(Own):
    """Computes in float64, whatever comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return super().forward(x.double())


class Checkpointed(Own):
    """Recomputes its activations in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return checkpoint(super().forward, x, use_reentrant=False)


class Noisy(Own):
    """Adds noise in every mode."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits = super().forward(x)
        return logits + 0.01 * torch.randn_like(logits)


class TwoStreams(Own):
    """Sees the images twice."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return super().forward(x) + self.other(x.flatten(1))


class Transformer(nn.Module):
    """A spatial transformer: the first layer finds where the others look."""

    def __init__(self) -> None:
        super().__init__()
        self.where, self.net = nn.Linear(64, 6), Own()
        self.where.weight.data.mul_(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        identity = torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.0])
        affine = (self.where(x.flatten(1)) + identity).view(-1, 2, 3)
        grid = F.affine_grid(affine, [x.shape[0], 1, 8, 8], align_corners=False)
        return self.net(F.grid_sample(x, grid, align_corners=False))


class SharedLayer(Own):
    """Uses its first layer for two scales."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        return super().forward(x) + super().forward(F.avg_pool2d(x, 2))


class Pair(Own):
    """Returns more than logits."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the logits and the features."""
        logits = super().forward(x)
        return logits, logits


def exported() -> nn.Module:
    """The module of an exported program."""
    images = torch.rand(2, *SHAPE)
    return torch.export.export(Own().eval(), (images,), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()


def int8() -> nn.Module:
    """A network that computes in whole numbers."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, CLASSES))
    return torch.ao.quantization.quantize_dynamic(net.eval(), {nn.Linear})


def inference() -> nn.Module:
    """A network that was made for inference alone."""
    with torch.inference_mode():
        return Own()


def training(sentence: str) -> dict[str, str]:
    """The refusal of every activity that trains, with one sentence."""
    return dict.fromkeys((*METHODS, "train", "safetensors", *GRAPHS), sentence)


def saving(sentence: str) -> dict[str, str]:
    """What is refused if a run cannot be saved."""
    return dict.fromkeys(("train", "safetensors", *GRAPHS), sentence)


_FIXED = "graph of this model is fixed in eval mode.*pass the network that it was made from"
_WRAPPED = "is wrapped in DataParallel: pass the network itself, model.module"
_HOOKS = "pass the network that it was made from"
_SCRIPTED = "can be exported to safetensors only; load the run with the network"
_SPLIT = "YOPO cannot take its steps through the layer"
_NO_WEIGHTS = "no weights to train"


@dataclass(frozen=True)
class Kind:
    """A network, and what is expected of it."""

    build: Callable[[], Any]
    refuses: dict[str, str] = field(default_factory=dict)
    """The sentence, as a pattern, by the activity that is refused."""
    random: bool = False
    slow: bool = False

    def make(self, seed: int = 0) -> Any:
        """Return a new network; equal seeds give equal weights. PyTorch's announcements are not shown."""
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            return self.build()


KINDS = {
    "batch-norm": Kind(lambda: conv(nn.BatchNorm2d(4))),
    "batch-norm-of-the-batch": Kind(lambda: conv(nn.BatchNorm2d(4, track_running_stats=False))),
    "group-norm": Kind(lambda: conv(nn.GroupNorm(2, 4))),
    "instance-norm": Kind(lambda: conv(nn.InstanceNorm2d(4, affine=True, track_running_stats=True))),
    "layer-norm": Kind(lambda: conv(nn.LayerNorm([4, 8, 8]))),
    "dropout": Kind(lambda: conv(nn.Dropout(0.1)), random=True),
    "mlp": Kind(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, CLASSES))),
    "contiguous": Kind(Contiguous),
    "view": Kind(Viewing),
    "lstm": Kind(Rows),
    "gru": Kind(functools.partial(Rows, nn.GRU)),
    "encoder": Kind(Encoder),
    "attention": Kind(Attention),
    "weight-norm": Kind(lambda: with_first(parametrizations.weight_norm)),
    "weight-norm-by-hooks": Kind(lambda: with_first(nn.utils.weight_norm)),
    "spectral-norm": Kind(lambda: with_first(parametrizations.spectral_norm)),
    "spectral-norm-by-hooks": Kind(lambda: with_first(nn.utils.spectral_norm)),
    "lipschitz": Kind(lambda: with_first(lambda layer: LipschitzConv(1, 4, 3))),
    "pruned": Kind(lambda: with_first(lambda layer: prune.l1_unstructured(layer, "weight", 0.5))),
    "tied": Kind(Tied),
    "frozen-layer": Kind(lambda: with_first(lambda layer: layer.requires_grad_(False))),
    "train-returns-nothing": Kind(FrozenNorm),
    "extra-state": Kind(ExtraState, refuses=saving("cannot be saved.* return a tensor from get_extra_state")),
    "sparse-buffer": Kind(SparseBuffer, refuses=saving("cannot be saved.* store it as a dense tensor")),
    "complex": Kind(Complex, refuses={"yopo": "no convolution or linear layer to start YOPO from"}),
    "double": Kind(Double),
    "channels-last": Kind(lambda: conv(nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)),
    "checkpointed": Kind(Checkpointed),
    "noisy": Kind(Noisy, random=True),
    "two-streams": Kind(TwoStreams, refuses={"yopo": _SPLIT}),
    "spatial-transformer": Kind(Transformer, refuses={"yopo": _SPLIT}),
    "shared-layer": Kind(SharedLayer, refuses={"yopo": _SPLIT}),
    "scripted": Kind(
        lambda: torch.jit.script(conv(nn.BatchNorm2d(4))),
        refuses={"yopo": _HOOKS, **dict.fromkeys(GRAPHS, _SCRIPTED)},
        slow=True,
    ),
    "traced": Kind(
        lambda: torch.jit.trace(Own(), torch.rand(2, *SHAPE)),
        refuses={"yopo": _HOOKS, **dict.fromkeys(GRAPHS, _SCRIPTED)},
        slow=True,
    ),
    "frozen-script": Kind(
        lambda: torch.jit.freeze(torch.jit.script(conv(nn.BatchNorm2d(4)).eval())), refuses=training(_FIXED), slow=True
    ),
    "exported": Kind(exported, refuses=training(_FIXED), slow=True),
    "data-parallel": Kind(lambda: nn.DataParallel(Own()), refuses=saving(_WRAPPED)),
    "compiled": Kind(
        lambda: torch.compile(Own(), backend="aot_eager"),
        refuses={"yopo": _HOOKS, "fgsm-ga": "as it was before torch.compile"},
        slow=True,
    ),
    "int8": Kind(int8, refuses=training(_NO_WEIGHTS)),
    "frozen-weights": Kind(lambda: Own().requires_grad_(False), refuses=training(_NO_WEIGHTS)),
    "lazy": Kind(
        lambda: nn.Sequential(nn.Flatten(), nn.LazyLinear(CLASSES)), refuses=dict.fromkeys(ACTIVITIES, "lazy layers")
    ),
    "inference": Kind(inference, refuses=dict.fromkeys(ACTIVITIES, r"made in torch\.inference_mode")),
    "half": Kind(lambda: Own().half(), refuses=dict.fromkeys(ACTIVITIES, r"float16|float\(\)")),
    "pair": Kind(Pair, refuses=dict.fromkeys(ACTIVITIES, "must return a tensor of logits")),
    "function": Kind(lambda: Own().forward, refuses=dict.fromkeys(ACTIVITIES, "wrap it in one")),
}
