"""Metrics of a run: sums over the steps of an epoch, the row of an epoch, and `metrics.jsonl`.

The sums, and the quantiles and decile means of step sizes and gradient norms, are computed on the device and read once.
The file is read strictly, because its rows say whether the run collapsed. Each row has a checksum of its content.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch
from torch import Tensor, nn

from atas._utils import documents
from atas._utils.documents import MalformedError, check_keys, conform, parse_json, read_bytes
from atas._utils.environment import Environment
from atas.core.dispatch import fast_op
from atas.distributed.state import gather_rows
from atas.distributed.world import SINGLE, World
from atas.errors import AtasError, DataError
from atas.methods import AdaptiveStepSizes

if TYPE_CHECKING:
    from atas.training.engine import Engine
    from atas.training.monitor import ProbeResult

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_DECILES = 10


class _FirstKeys(TypedDict):
    """What every version wrote for an epoch."""

    epoch: int
    updates: int
    rate: float
    loss: float
    train_accuracy: float
    collapsed: bool
    seconds: float


class _EpochKeys(_FirstKeys, total=False):
    """The row of an epoch that was not probed; `shown` is the side of the images if they were resized."""

    examples_per_second: float
    step_size: float
    gradient_norm: float
    step_sizes: list[float]
    gradient_norms: list[float]
    step_size_by_tenth: list[float]
    gradient_norm_by_tenth: list[float]
    shown: int


class _Accuracies(_EpochKeys):
    clean: float
    fgsm: float
    pgd10: float


class _ProbedKeys(_Accuracies, total=False):
    """The row of an epoch after which the monitor probed."""

    pgd10_loss: float | None
    probe_gradient_norms: list[float]


class _Event(TypedDict):
    event: Literal["collapse", "breakdown", "rollback", "stop", "diverged", "resume"]
    epoch: int


class _Collapse(_Event):
    pgd10: float
    fgsm: float


class _Breakdown(_Event):
    clean: float


class _Return(_Event):
    to_epoch: int


class _Rollback(_Return, total=False):
    step_scale: float


class _Resume(_Event, Environment, total=False):
    """What differs from the environment that the run began in."""

    processes: int


_EVENTS: dict[str, Any] = {
    "collapse": _Collapse,
    "breakdown": _Breakdown,
    "rollback": _Rollback,
    "stop": _Return,
    "resume": _Resume,
}


def epoch_row(
    epoch: int,
    engine: Engine,
    means: tuple[float, float, float],
    probe: ProbeResult | None,
    collapsed: bool,
    seconds: float,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the row of an epoch, and histograms over all examples if the method has step sizes per example.

    `means` are those of `EpochSums`; `probe` is None if the monitor did not probe; `seconds` is the time of all
    training steps since the first epoch.
    """
    loss, right, step_size = means
    row: dict[str, Any] = {
        "epoch": epoch,
        "updates": engine.updates,
        "rate": engine.learning_rate(),
        "loss": loss,
        "train_accuracy": right,
        **(_probe_columns(probe) if probe else {}),
        "collapsed": collapsed,
        **({"probe_gradient_norms": list(probe.gradient_norms)} if probe else {}),
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


def _probe_columns(probe: ProbeResult) -> dict[str, Any]:
    return {"clean": probe.clean, "fgsm": probe.fgsm, "pgd10": probe.pgd10, "pgd10_loss": probe.pgd10_loss}


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
    """The file metrics.jsonl: one line of JSON per epoch or event, with a checksum of the line's content.

    On resume the file is cut back to the size that it had at the checkpoint; if it is smaller, `lost_rows` is true and
    whole lines are kept. Without a path nothing is written: only rank 0 writes the file.
    """

    def __init__(self, path: Path | None, keep_bytes: int = 0) -> None:
        self.path, self.lost_rows = path, False
        if path is None:
            return
        path.touch()
        with path.open("rb+") as file:
            kept = file.read(keep_bytes)
            self.lost_rows = len(kept) < keep_bytes
            file.truncate(kept.rfind(b"\n") + 1 if self.lost_rows else keep_bytes)

    @property
    def size(self) -> int:
        """The size of the file in bytes."""
        return 0 if self.path is None else self.path.stat().st_size

    def write(self, row: dict[str, Any]) -> None:
        """Append one line and sync it to the disk."""
        if self.path is None:
            return
        line = json.dumps(row | {documents.CHECKSUM: documents.checksum(row)})
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise AtasError(
                f"cannot write {self.path} ({error.strerror}); make room on the disk and continue with --resume"
            ) from error


def read_metrics(path: Path, *, finished: bool = False) -> list[dict[str, Any]]:
    """Return the rows of a metrics file, without their checksums; raise DataError if it is damaged.

    A kill may cut off the last line, which is left out; in a `finished` run it did not.
    """
    if not path.exists():
        return []
    try:
        *lines, last = read_bytes(path).split(b"\n")
    except OSError as error:
        raise DataError(f"cannot read the metrics {path}: {error.strerror or error}") from error
    except MalformedError as error:
        raise _damaged(path, str(error)) from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(_parse_row(line))
        except MalformedError as error:
            raise _damaged(path, f"line {number}: {error}") from error
    if last:
        try:
            rows.append(_parse_row(last))
        except MalformedError as error:
            if finished or b"}" in last:  # the end of a row: no kill cut it off
                raise _damaged(path, f"line {len(lines) + 1}: {error}") from error
    _check_order(path, completed_epochs(rows))
    return rows


def _parse_row(line: bytes) -> dict[str, Any]:
    row: dict[str, Any] = conform(parse_json(line), dict[str, Any])
    kind = _EVENTS.get(str(row["event"]), _Event) if "event" in row else _epoch_keys(row)
    documents.verify_checksum(conform(row, kind))
    if row.pop(documents.CHECKSUM, None) is None:  # written by an earlier version, or the key is damaged
        check_keys(row, kind)
    return row


def _epoch_keys(row: dict[str, Any]) -> Any:
    """Return the keys that the row of an epoch must have: all of a probe or none."""
    probed = _ProbedKeys.__annotations__.keys() - _EpochKeys.__annotations__.keys()
    return _ProbedKeys if probed & row.keys() else _EpochKeys


def _check_order(path: Path, rows: list[dict[str, Any]]) -> None:
    """Raise DataError unless the epochs increase, after those are left out that a rollback undid."""
    epochs = [-1, *(row["epoch"] for row in rows)]
    for before, epoch in itertools.pairwise(epochs):
        if epoch <= before:
            raise _damaged(path, f"epoch {epoch + 1} follows epoch {before + 1}")


def _damaged(path: Path, why: str) -> DataError:
    return DataError(
        f"the metrics {path} are damaged ({why}); restore the file from a copy, or train again: without it, nothing "
        f"says whether the run collapsed"
    )


def first_collapse(epochs: Iterable[dict[str, Any]]) -> int | None:
    """Return the first collapsed epoch, counted from 1, of rows of metrics."""
    return next((row["epoch"] + 1 for row in epochs if row.get("collapsed")), None)


def missing_epochs(rows: list[dict[str, Any]]) -> list[int]:
    """Return the epochs, counted from 1, before the last row that have no row: their lines were lost before a resume.

    >>> missing_epochs([{"epoch": 1}, {"epoch": 3}])
    [1, 3]
    """
    known = {row["epoch"] for row in rows}
    return [epoch + 1 for epoch in range(max(known, default=0)) if epoch not in known]


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
