"""Metrics of a run: sums over the steps of an epoch, the row of an epoch, and `metrics.jsonl`.

The sums, and the quantiles and decile means of step sizes and gradient norms, are computed on the device and read once.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from atas.core.dispatch import fast_op
from atas.distributed.state import gather_rows
from atas.distributed.world import SINGLE, World
from atas.errors import AtasError
from atas.methods import AdaptiveStepSizes

if TYPE_CHECKING:
    from atas.training.engine import Engine
    from atas.training.monitor import ProbeResult

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_DECILES = 10


def epoch_row(
    epoch: int, engine: Engine, means: tuple[float, float, float], probe: ProbeResult, collapsed: bool, seconds: float
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the row of an epoch, and histograms over all examples if the method has step sizes per example.

    `means` are those of `EpochSums`; `seconds` is the time of all training steps since the first epoch.
    """
    loss, right, step_size = means
    row: dict[str, Any] = {
        "epoch": epoch,
        "updates": engine.updates,
        "rate": engine.learning_rate(),
        "loss": loss,
        "train_accuracy": right,
        "clean": probe.clean,
        "fgsm": probe.fgsm,
        "pgd10": probe.pgd10,
        "pgd10_loss": probe.pgd10_loss,
        "collapsed": collapsed,
        "probe_gradient_norms": list(probe.gradient_norms),
        "seconds": seconds,
        "examples_per_second": examples_per_second(engine, epoch + 1, 0, seconds),
    }
    histograms: dict[str, Tensor] = {}
    if isinstance(engine.method, AdaptiveStepSizes):
        local = engine.method.step_sizes, engine.method.gradient_norms
        sizes, norms = (gather_rows(values, engine.loader.shard, engine.world) for values in local)
        row |= {
            "step_size": step_size,
            "gradient_norm": float(norms.mean()),
            "step_sizes": quantiles(sizes),
            "gradient_norms": quantiles(norms),
            "step_size_by_tenth": decile_means(norms, sizes),
            "gradient_norm_by_tenth": decile_means(norms, norms),
        }
        histograms = {"step_sizes": sizes, "gradient_norms": norms}
    if engine.resolution is not None:
        row["shown"] = engine.resolution
    return row, histograms


def examples_per_second(engine: Engine, epochs: int, batches: int, seconds: float) -> float:
    """Return the speed of all ranks together, after `epochs` whole epochs and `batches` batches of the next."""
    examples = engine.loader.shard.examples
    return (epochs * examples + min(batches * engine.recipe.training.batch_size, examples)) / max(seconds, 1e-9)


def quantiles(values: Tensor) -> list[float]:
    """Return the quantiles at the shares `QUANTILES`, by nearest rank.

    >>> quantiles(torch.arange(101.0))
    [5.0, 25.0, 50.0, 75.0, 95.0]
    """
    ordered = values.sort().values
    ranks = [round(share * (len(ordered) - 1)) for share in QUANTILES]
    return ordered[torch.tensor(ranks, device=values.device)].tolist()


def decile_means(norms: Tensor, values: Tensor) -> list[float]:
    """Return the mean of `values` over each tenth of the examples, ordered by norm.

    >>> decile_means(torch.tensor([3.0, 1.0, 2.0] * 10), torch.tensor([30.0, 10.0, 20.0] * 10))[::9]
    [10.0, 30.0]
    """
    ordered = values[norms.argsort(stable=True)]
    parts = ordered.tensor_split(min(_DECILES, len(ordered)))
    return torch.stack([part.mean() for part in parts]).tolist()


class MetricsFile:
    """The file metrics.jsonl: one line of JSON per epoch or event.

    On resume the file is cut back to the size that it had at the checkpoint. Without a path nothing is written: only
    rank 0 writes the file.
    """

    def __init__(self, path: Path | None, keep_bytes: int = 0) -> None:
        self.path = path
        if path is None:
            return
        path.touch()
        with path.open("rb+") as file:
            file.truncate(min(keep_bytes, path.stat().st_size))

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return 0 if self.path is None else self.path.stat().st_size

    def write(self, row: dict[str, Any]) -> None:
        """Append one line and sync it to the disk."""
        if self.path is None:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise AtasError(
                f"cannot write {self.path} ({error.strerror}); make room on the disk and continue with --resume"
            ) from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics file; a line that a crash cut off is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            break
        if isinstance(row, dict):
            rows.append(row)
    return rows


class EpochSums(nn.Module):
    """Sums over the steps of an epoch, on the device: loss, correct predictions, step sizes, examples. Each rank has
    the sums of its own examples."""

    sums: Tensor

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros(4, dtype=torch.float64, device=device))

    def read(self, world: World = SINGLE) -> tuple[float, float, float]:
        """Return mean loss, accuracy and step size so far, over all ranks; waits for the device."""
        loss, right, step_size, count = world.all_reduce_sum(self.sums.clone()).tolist()
        return (loss / count, right / count, step_size / count) if count else (0.0, 0.0, 0.0)


@fast_op
def accumulate_metrics(
    sums: Tensor, loss: Tensor, logits: Tensor, y: Tensor, index: Tensor, step_sizes: Tensor | None
) -> None:
    """Add a step's loss, correct predictions, step sizes and examples to the sums of `EpochSums`."""
    right = (logits.argmax(1) == y).sum()
    size = torch.zeros_like(loss) if step_sizes is None else step_sizes[index].sum()
    values = (loss * len(y), right, size, torch.full_like(loss, len(y)))
    sums += torch.stack([value.double() for value in values])


def completed_epochs(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of epochs, without events and without epochs that a rollback or a stop undid."""
    kept: list[dict[str, Any]] = []
    for row in rows:
        if "event" not in row:
            kept.append(row)
        elif "to_epoch" in row:
            kept = [earlier for earlier in kept if earlier["epoch"] < row["to_epoch"]]
    return kept
