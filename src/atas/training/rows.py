"""The row of metrics that an epoch leaves behind."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from atas.methods import Adaptive
from atas.training.engine import Engine
from atas.training.gathering import of_all
from atas.training.monitor import Probe
from atas.training.spread import by_tenth, quantiles

_FIRST = 2  # epochs


def epoch_row(
    epoch: int, engine: Engine, means: tuple[float, float, float], probe: Probe, collapsed: bool, seconds: float
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What is known at the end of an epoch, and values of every example where the method remembers any.

    `means` are those of `Totals`, `seconds` were spent in training steps since the first epoch.
    """
    loss, right, step_size = means
    row: dict[str, Any] = {
        "epoch": epoch,
        "updates": engine.updates,
        "rate": engine.rate(),
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
    if isinstance(engine.method, Adaptive):
        remembered = engine.method.step_sizes, engine.method.gradient_norms
        sizes, norms = (of_all(values, engine.batches.part, engine.peers) for values in remembered)
        row |= {
            "step_size": step_size,
            "gradient_norm": float(norms.mean()),
            "step_sizes": quantiles(sizes),
            "gradient_norms": quantiles(norms),
            "step_size_by_tenth": by_tenth(norms, sizes),
            "gradient_norm_by_tenth": by_tenth(norms, norms),
        }
        histograms = {"step_sizes": sizes, "gradient_norms": norms}
    if engine.shown is not None:
        row["shown"] = engine.shown
    return row, histograms


def too_long(row: dict[str, Any], eps: float) -> str | None:
    """What to tell a person where even the shortest adaptive steps are longer than the ball is wide. In the first
    epochs they are in any training, as gradients are small."""
    shortest = row.get("step_size_by_tenth", [0.0])[-1]
    if row["epoch"] < _FIRST or shortest < (2 - 1e-6) * eps:
        return None
    return (
        f"Steps are too long to adapt: even the shortest tenth of them has {shortest / eps:.3g} times eps, where 2 eps "
        f"end at the edge of the ball wherever they begin; set method.max_step to about 2 eps, method.clip below it."
    )


def examples_per_second(engine: Engine, epochs: int, batches: int, seconds: float) -> float:
    """Of all processes together, after so many whole epochs and batches of the next."""
    examples = engine.batches.part.examples
    return (epochs * examples + min(batches * engine.settings.training.batch_size, examples)) / max(seconds, 1e-9)
