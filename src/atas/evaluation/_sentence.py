"""A result in a line that can be pasted into a paper."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atas.evaluation._names import is_pgd, written
from atas.threat import in_255

if TYPE_CHECKING:
    from atas.evaluation._result import Evaluation


def sentence(result: Evaluation) -> str:
    """Accuracies with their intervals, the threat, and what someone needs to repeat the measurement."""
    norm = {"linf": "L-infinity", "l2": "L2"}.get(result.threat.name, result.threat.name)
    eps = str(result.threat).partition("(")[2].rstrip(")")
    lowest = min(accuracy for name, accuracy in result.accuracy.items() if name != "worst")
    names = [name for name in result.correct if name != "worst" or result.accuracy[name] < lowest]
    figures = ", ".join(f"{written(name)} {_figure(result, name)}" for name in names)
    doubts = f"; with warnings ({', '.join(caution.kind for caution in result.warnings)})" if result.warnings else ""
    settings = result.protocol.get("attacks", {})
    sizes = {_step(settings[name]["step_size_value"], result.threat.eps) for name in filter(is_pgd, settings)}
    steps = f", PGD in steps of {' and '.join(sorted(sizes))}" if sizes else ""
    return (
        f"Accuracy in percent with 95% intervals: {figures}; {norm}, eps = {eps}{steps}, {result.n:,} images, "
        f"verdicts in {result.protocol.get('precision', 'float32')}, seed {result.protocol.get('seed', 0)}, "
        f"atas {result.environment.get('atas', '?')}, weights {result.weights}, data {result.data}{doubts}."
    )


def _figure(result: Evaluation, name: str) -> str:
    low, high = (100 * end for end in result.interval[name])
    return f"{100 * result.accuracy[name]:.2f} ({low:.2f} to {high:.2f})"


def _step(size: float, eps: float) -> str:
    """A size by eps, where it is a round part of it.

    >>> _step(8 / 255 / 5, 8 / 255), _step(3 / 255, 8 / 255), _step(0.01, 8 / 255)
    ('eps/5', '3/255', '0.01')
    """
    parts = round(eps / size) if size else 0
    return f"eps/{parts}" if parts and abs(parts * size - eps) < 1e-6 * eps else in_255(size)
