"""Gradient norm and step size of every example after every epoch: recorded during training, ranked, and summarised.

Methods with adaptive steps know both. A method with a fixed step is the limit of its adaptive version for a large c, so
the same run with recorded norms is that version with `FIXED_STEP`: FGSM-RS is `fgsm-rs-adaptive`, ATTA is
`atas-literal`.

Examples are ranked by GN(x_i), the gradient norm averaged over the epochs (the paper's section 3). The rank is the
share of examples with a smaller norm. D_i^j has the examples whose rank lies in [(i-1)/10, j/10); the paper prints
10(i-1)/n, which is a slip.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from atas._utils.files import write_atomically
from atas.errors import DataError
from atas.methods import AdaptiveStepSizes
from atas.training.callbacks import StepInfo
from atas.training.engine import Engine

FIXED_STEP = {"c": 1e9, "beta": 0.0}  # gamma/c over 1 + |g|/c is gamma/c in float32, and v is the last norm itself
_BINS = 60


class EpochNorms:
    """Callback that writes norms and step sizes of all examples to one file per epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def due(self, info: StepInfo) -> bool:
        """Return whether an epoch ends."""
        return info.ends_epoch

    def on_step_end(self, info: StepInfo, engine: Engine) -> None:
        """Write the file of the epoch."""
        method = engine.method
        assert isinstance(method, AdaptiveStepSizes)
        tensors = {"gradient_norm": method.gradient_norms.cpu(), "step_size": method.step_sizes.cpu().clone()}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(_file(self.folder, info.epoch), lambda temporary: save_file(tensors, temporary))


def has_norms(folder: Path, epochs: int) -> bool:
    """Return whether there is a file for every epoch."""
    return all(_file(folder, epoch).exists() for epoch in range(epochs))


def read_norms(folder: Path, epochs: int) -> tuple[Tensor, Tensor]:
    """Return norms and step sizes, each of shape (epochs, examples)."""
    if not has_norms(folder, epochs):
        raise DataError(f"{folder} lacks gradient norms of some of {epochs} epochs; remove the run to train again")
    files = [load_file(_file(folder, epoch)) for epoch in range(epochs)]
    return torch.stack([file["gradient_norm"] for file in files]), torch.stack([file["step_size"] for file in files])


def summary(norms: Tensor, sizes: Tensor) -> dict[str, Any]:
    """Return tails, a histogram, and the means of each decile by epoch; deciles are by the mean norm.

    G bounds the norm of an example. The paper does not say whether its figure shows the mean, largest or last norm.
    """
    mean = mean_norms(norms)
    known = norms.amax(1) > 0  # warm-up epochs store no norms
    if not known.any():  # all epochs were warm-up
        known = torch.ones_like(known)
    decile = deciles(mean)
    counts, edges = torch.histogram(mean.float(), _BINS)
    return {
        "examples": norms.shape[1],
        "epochs": (known.nonzero().flatten() + 1).tolist(),
        "tail": {"mean": tail(mean), "largest": tail(norms.amax(0)), "last": tail(norms[-1])},
        "average": {"norm": float(mean.mean()), "step_size": float(sizes[known].double().mean())},
        "histogram": {"edges": rounded(edges), "counts": [int(count) for count in counts]},
        "norm_by_tenth": [rounded(row) for row in means_by_decile(norms[known], decile)],
        "step_by_tenth": [rounded(row) for row in means_by_decile(sizes[known], decile)],
    }


def rounded(values: Tensor) -> list[float]:
    """Return numbers rounded to five significant digits, for a record."""
    return [float(f"{value:.5g}") for value in values.tolist()]


def _file(folder: Path, epoch: int) -> Path:
    return folder / f"epoch-{epoch + 1:04}.safetensors"


NUM_DECILES = 10


def mean_norms(norms: Tensor) -> Tensor:
    """Return the mean norm of each example over the epochs in which it has one; `norms` is (epochs, examples)."""
    counts = norms > 0
    return (norms.double() * counts).sum(0) / counts.sum(0).clamp_min(1)


def deciles(norms: Tensor) -> Tensor:
    """Return the decile of each example, 1 to 10.

    >>> deciles(torch.tensor([5.0, 40.0, 1.0, 12.0, 9.0])).tolist()
    [3, 9, 1, 7, 5]
    """
    smaller = torch.searchsorted(norms.sort().values, norms, side="left")
    return NUM_DECILES * smaller // len(norms) + 1  # integer arithmetic, because 0.3 is not 3/10 in binary


def decile_members(decile: Tensor, first: int, last: int) -> Tensor:
    """Return the indices of D_first^last, sorted."""
    return ((decile >= first) & (decile <= last)).nonzero().flatten()


def class_shares(decile: Tensor, labels: Tensor, classes: int) -> Tensor:
    """Return the share of every class in every decile, of shape (10, classes); rows sum to 1."""
    cells = torch.bincount((decile - 1) * classes + labels, minlength=NUM_DECILES * classes)
    counts = cells.view(NUM_DECILES, classes).double()
    return counts / counts.sum(1, keepdim=True).clamp_min(1)


def means_by_decile(values: Tensor, decile: Tensor) -> Tensor:
    """Return the means of `values` (epochs, examples) over the examples of each decile, of shape (epochs, 10)."""
    sums = torch.zeros(len(values), NUM_DECILES, dtype=torch.float64)
    sums.index_add_(1, decile - 1, values.double())
    return sums / torch.bincount(decile - 1, minlength=NUM_DECILES).clamp_min(1)


def tail(norms: Tensor) -> float:
    """Return how long-tailed norms are: mean G^2 / (mean G)^2, which is 1 if all norms are equal."""
    norms = norms.double()
    return float(norms.square().mean() / norms.mean().square()) if norms.any() else 1.0
