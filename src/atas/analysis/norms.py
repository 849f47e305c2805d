"""Gradient norm and step size of every example after every epoch, kept while a training goes on.

Methods with adaptive steps know both. A method with a fixed step is the limit of its adaptive twin for a large c, so
the same run with remembered norms is that twin with `FIXED`: FGSM-RS is `fgsm-rs-adaptive`, ATTA is `atas-literal`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from atas._files import write_atomically
from atas.analysis import subsets
from atas.errors import DataError
from atas.methods import Adaptive
from atas.training.engine import Engine
from atas.training.observe import Moment

FIXED = {"c": 1e9, "beta": 0.0}  # gamma/c over 1 + |g|/c is gamma/c in float32, and v is the last norm itself
_BINS = 60


class EpochNorms:
    """An observer that writes a file an epoch into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def due(self, moment: Moment) -> bool:
        """At the end of an epoch."""
        return moment.ends_epoch

    def look(self, moment: Moment, engine: Engine) -> None:
        """Write both, of all examples."""
        method = engine.method
        assert isinstance(method, Adaptive)
        found = {"gradient_norm": method.gradient_norms.cpu(), "step_size": method.step_sizes.cpu().clone()}
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(_file(self.folder, moment.epoch), lambda temporary: save_file(found, temporary))


def has_norms(folder: Path, epochs: int) -> bool:
    """Whether there is a file of every epoch."""
    return all(_file(folder, epoch).exists() for epoch in range(epochs))


def read_norms(folder: Path, epochs: int) -> tuple[Tensor, Tensor]:
    """Norms and step sizes, each (epochs, examples)."""
    if not has_norms(folder, epochs):
        raise DataError(f"{folder} does not hold the gradient norms of {epochs} epochs; remove the run to train again")
    files = [load_file(_file(folder, epoch)) for epoch in range(epochs)]
    return torch.stack([file["gradient_norm"] for file in files]), torch.stack([file["step_size"] for file in files])


def summary(norms: Tensor, sizes: Tensor) -> dict[str, Any]:
    """What figures need of them: tails, a histogram, and the course of every tenth by the averaged norm.

    G bounds an example's norm. The text does not say which of mean, largest and last norm its figure shows.
    """
    mean = subsets.averaged(norms)
    known = norms.amax(1) > 0  # an epoch of warm-up remembers no norm
    if not known.any():  # a training that was all warm-up
        known = torch.ones_like(known)
    tenth = subsets.tenths(mean)
    counts, edges = torch.histogram(mean.float(), _BINS)
    return {
        "examples": norms.shape[1],
        "epochs": (known.nonzero().flatten() + 1).tolist(),
        "tail": {"mean": subsets.tail(mean), "largest": subsets.tail(norms.amax(0)), "last": subsets.tail(norms[-1])},
        "average": {"norm": float(mean.mean()), "step_size": float(sizes[known].double().mean())},
        "histogram": {"edges": rounded(edges), "counts": [int(count) for count in counts]},
        "norm_by_tenth": [rounded(row) for row in subsets.means_by_tenth(norms[known], tenth)],
        "step_by_tenth": [rounded(row) for row in subsets.means_by_tenth(sizes[known], tenth)],
    }


def rounded(values: Tensor) -> list[float]:
    """Plain numbers of five digits, for a record."""
    return [float(f"{value:.5g}") for value in values.tolist()]


def _file(folder: Path, epoch: int) -> Path:
    return folder / f"epoch-{epoch + 1:04}.safetensors"
