"""`accuracy_curve`: accuracy at several budgets, and the smallest perturbation found of each image."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich import box
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from atas import attacks as library
from atas._utils.files import check_json_path, write_text
from atas._utils.formatting import printable
from atas.attacks import Attack, AttackEnsemble, Clean, StagedAttack
from atas.attacks.base import choose_threat
from atas.attacks.search import AtBudget
from atas.core.arguments import check_argument, check_arguments, describe
from atas.core.autograd import contiguous, set_mode
from atas.errors import UsageError
from atas.evaluation.backend import device_context, hookable, model_dtype, resolve_device
from atas.evaluation.evaluator import evaluate
from atas.evaluation.inputs import ChunkReader, MapDataset, open_source
from atas.evaluation.intervals import wilson
from atas.evaluation.progress import StatusCallback
from atas.evaluation.rendering import HEADER, accuracy_cells
from atas.evaluation.result import CURVE_KIND, Evaluation
from atas.evaluation.result_format import MAX_LABELS
from atas.evaluation.resume import SAVE_INTERVAL
from atas.evaluation.warnings import EvaluationWarning
from atas.ops.precision import strict_float32
from atas.threat import Threat, format_pixels

_FORMAT = 1
_DEFAULT_BUDGETS = 8
_BISECTIONS = 10  # between an image and its adversarial input
_NAME = "curve"
_HEADER = ("eps", *HEADER[1:4])


@dataclass(frozen=True, eq=False, repr=False)
class AccuracyCurve:
    """Accuracy at several budgets, from the smallest perturbation that was found for each image.

    An image is correct at a budget if the smallest perturbation is larger, so accuracy never rises with eps.

    Attributes:
        threat: the threat model with the largest budget.
        eps: the budgets in ascending order.
        smallest: for each image (n,) an upper bound on the smallest adversarial perturbation, in the norm: 0 where the
            model is wrong without one, and infinite where none was found up to the largest budget.
        attack: the name of the attack.
        protocol: the settings of the measurement.
        environment: software, hardware and date.
        weights: short hash of the model's state.
        data: short hash of images and labels.
        seconds: the time of the attack.
        warnings: reasons to doubt the accuracies.
        progress_files: the progress files, which `save` removes.
    """

    threat: Threat
    eps: tuple[float, ...]
    smallest: Tensor
    attack: str
    protocol: dict[str, Any]
    environment: dict[str, Any]
    weights: str
    data: str
    seconds: float
    warnings: tuple[EvaluationWarning, ...] = ()
    progress_files: tuple[Path, ...] = field(default=())

    @property
    def n(self) -> int:
        """The number of images."""
        return len(self.smallest)

    @cached_property
    def num_correct(self) -> tuple[int, ...]:
        """The number of images that are correct at each budget."""
        return tuple(int((self.smallest > eps).sum()) for eps in self.eps)

    @property
    def accuracy(self) -> tuple[float, ...]:
        """The fraction of images that are correct at each budget."""
        return tuple(count / self.n for count in self.num_correct)

    @property
    def interval(self) -> tuple[tuple[float, float], ...]:
        """Wilson's 95% interval of each accuracy."""
        return tuple(wilson(count, self.n) for count in self.num_correct)

    def rows(self) -> list[tuple[str, ...]]:
        """Return one row of text per budget."""
        counts = zip(self.eps, self.num_correct, strict=True)
        return [(self._format(eps), *accuracy_cells(count, self.n)) for eps, count in counts]

    def table(self) -> Table:
        """Return a table to print with rich."""
        title = Text(printable(f"{self.attack}, {self.threat.name}, {self.n} examples"))  # a name is not markup
        table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
        for heading in _HEADER:
            table.add_column(heading, justify="right")
        for row in self.rows():
            table.add_row(*row)
        return table

    def sentence(self) -> str:
        """Return the median of the smallest perturbations in a sentence."""
        median = float(self.smallest.median())
        if not median:
            return "The model is wrong on half of the images without a perturbation."
        if median == torch.inf:
            return f"No perturbation up to {self.rows()[-1][0]} was found for more than half of the images."
        size = self._format(median, digits=3)
        return f"Half of the images have an adversarial perturbation of at most {size} ({self.threat.name})."

    def _format(self, size: float, digits: int = 6) -> str:
        """Format a size in the unit of the budgets: as k/255 where one of them is a whole number of grey levels."""
        if self.threat.name == "linf" and any("/255" in format_pixels(eps) for eps in self.eps if eps):
            return f"{255 * size:.{digits}g}/255"
        return f"{size:.{digits}g}"

    def __str__(self) -> str:
        lines = [_HEADER, *self.rows()]
        widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
        text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([*text, self.sentence(), *(f"warning: {warning}" for warning in self.warnings)])

    def __repr__(self) -> str:
        return f"AccuracyCurve({self.attack}, {self.threat.name}, n={self.n}, {len(self.eps)} budgets)"

    def to_json(self) -> dict[str, Any]:
        """Return plain values; `smallest` is null where no perturbation was found."""
        return {
            "kind": CURVE_KIND,
            "format": _FORMAT,
            "norm": self.threat.name,
            "n": self.n,
            "attack": self.attack,
            "eps": list(self.eps),
            "accuracy": list(self.accuracy),
            "interval": [list(ends) for ends in self.interval],
            "smallest": [None if value == torch.inf else value for value in self.smallest.tolist()],
            "seconds": self.seconds,
            "warnings": [asdict(warning) for warning in self.warnings],
            "protocol": self.protocol,
            "environment": self.environment,
            "weights": self.weights,
            "data": self.data,
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the curve as JSON, atomically; then remove the progress files."""
        check_json_path(Path(path), "the curve")
        write_text(Path(path), json.dumps(self.to_json(), indent=1) + "\n")
        for file in self.progress_files:
            file.unlink(missing_ok=True)


@check_arguments
def accuracy_curve(
    model: nn.Module,
    images: Tensor | np.ndarray | MapDataset,
    labels: Tensor | np.ndarray | None = None,
    threat: Threat | None = None,
    *,
    eps: Sequence[float] | None = None,
    attack: str | Attack = "pgd50",
    batch_size: int | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    step_size: float | None = None,
    precision: str = "auto",
    progress: StatusCallback | None = None,
    progress_file: str | os.PathLike[str] | None = None,
    progress_interval: float = SAVE_INTERVAL,
) -> AccuracyCurve:
    """Measure accuracy as a function of the budget, and the smallest perturbation found of each image.

    The attack runs at every budget, from small to large, on the images that no smaller budget broke. Ten steps of
    bisection between image and adversarial input then look for a shorter perturbation that still fools the model. A
    perturbation may thus be smaller than the budget at which it was found, and counts at smaller budgets too. Images
    and perturbed images must fit into memory.

    Args:
        model: maps images (N, C, H, W) in [0, 1] to logits (N, classes). It is never moved to another device.
        images: as in `atas.evaluate`.
        labels: integers (N,).
        threat: the threat model with the largest budget, such as `atas.Linf(8/255)`.
        eps: the budgets, at most the largest; by default its eighths. 0 is the accuracy without an attack.
        attack: a name as in `atas.attacks.names()`, or an attack of your own, which consists of searches. FAB searches
            for small perturbations itself.
        batch_size: as in `atas.evaluate`, like the rest.
        device: the device of the batches.
        seed: another seed gives other random starts.
        step_size: step size of PGD; by default a fifth of each budget.
        precision: precision of the search.
        progress: called with a `Status` at each poll of a search.
        progress_file: file for the progress; after a stop, the same call resumes from it.
        progress_interval: seconds between two writes of the progress file.

    >>> from atas import Linf
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4))
    >>> x = torch.rand(50, 1, 4, 4)
    >>> curve = accuracy_curve(model, x, model(x).argmax(1), Linf(0.2), eps=[0, 0.05, 0.1, 0.2], attack="pgd10")
    >>> curve.accuracy[0], len(curve.smallest), list(curve.accuracy) == sorted(curve.accuracy, reverse=True)
    (1.0, 50, True)
    """
    if not isinstance(threat, Threat):
        raise UsageError(f"the threat model is one such as atas.Linf(8/255); got {describe(threat)}")
    budgets = _budgets(eps, threat)
    staged = _staged(attack, step_size)
    choose_threat(staged, threat)
    searches = tuple(AtBudget(search, budget) for budget in budgets if budget for search in staged.stages)
    if len({search.name for search in searches}) >= MAX_LABELS:
        raise UsageError(
            f"a curve has fewer than {MAX_LABELS} searches; '{staged.name}' with {len(staged.stages)} searches at each "
            f"of {len(budgets)} budgets has more: pass fewer budgets"
        )
    found = evaluate(
        model,
        images,
        labels,
        threat,
        attacks=[AttackEnsemble(_NAME, searches)] if searches else [],
        batch_size=batch_size,
        device=device,
        seed=seed,
        precision=precision,
        progress=progress,
        progress_file=progress_file,
        progress_interval=progress_interval,
        keep=True,
        details=False,
    )
    smallest = torch.where(found.correct[Clean.name], torch.inf, 0.0).double()
    if searches:
        smallest = _smallest(hookable(model), found, threat, searches, images, labels, device)
    return AccuracyCurve(
        threat=threat,
        eps=budgets,
        smallest=smallest,
        attack=staged.name,
        protocol=found.protocol,
        environment=found.environment,
        weights=found.weights,
        data=found.data,
        seconds=found.seconds.get(_NAME, found.seconds[Clean.name]),
        warnings=found.warnings,
        progress_files=found.progress_files,
    )


def _budgets(eps: Sequence[float] | None, threat: Threat) -> tuple[float, ...]:
    """Return the budgets in ascending order."""
    if eps is None:
        return tuple(threat.eps * (number + 1) / _DEFAULT_BUDGETS for number in range(_DEFAULT_BUDGETS))
    if isinstance(eps, str) or not isinstance(eps, Sequence) or not eps:
        raise UsageError(f"eps is a list of budgets such as [0, 2/255, 4/255]; got {describe(eps)}")
    for budget in eps:
        check_argument("eps", budget, float)
        if not 0 <= budget <= threat.eps:
            raise UsageError(f"eps must lie between 0 and the budget of {threat}; got {budget:g}")
    budgets = tuple(sorted({float(budget) for budget in eps}))
    if len({format_pixels(budget) for budget in budgets}) < len(budgets):
        raise UsageError("two budgets of eps are almost equal; leave one of them out")
    return budgets


def _staged(attack: str | Attack, step_size: float | None) -> StagedAttack:
    """Return the attack; raise UsageError if it does not consist of searches."""
    staged = library.create(attack, step_size) if isinstance(attack, str) else attack
    if not isinstance(staged, StagedAttack):
        raise UsageError(
            f"a curve needs an attack of searches, such as pgd50, apgd-ce, fab-t or autoattack; got {describe(attack)}"
        )
    return staged


def _smallest(
    model: nn.Module,
    found: Evaluation,
    threat: Threat,
    searches: tuple[AtBudget, ...],
    images: object,
    labels: object,
    device: torch.device | str | None,
) -> Tensor:
    """Return an upper bound on the smallest perturbation of each image."""
    source = open_source(images, labels)
    on, dtype = resolve_device(model, source.device, device), model_dtype(model)
    x, y = ChunkReader(source, dtype).read(range(len(source)))
    # Only a point inside the ball was accepted: rounding of its distance must not move it out.
    budget = {search.name: search.budget for search in searches} | {Clean.name: 0.0}
    last = found.broken_by.get(_NAME) or _labels(found, searches[-1].name)
    smallest = torch.tensor([torch.inf if name is None else budget[name] for name in last], dtype=torch.float64)
    rows, size = ((smallest > 0) & (smallest < torch.inf)).nonzero().flatten(), found.protocol["batch_size"]
    with device_context(on), torch.no_grad(), set_mode(model, training=False), strict_float32(on):
        for batch in rows.split(size) if len(rows) else ():  # not every network takes a batch of no images
            image, point = x[batch].to(on), found.adversarial[_NAME][batch].to(on)
            shortest = _shorten(model, image, point, y[batch].to(on))
            smallest[batch] = torch.minimum(smallest[batch], threat.distance(shortest, image).double().cpu())
    return smallest


def _labels(found: Evaluation, search: str) -> list[str | None]:
    """Return what broke each example if there is only one search."""
    correct, clean = found.correct[_NAME].tolist(), found.correct[Clean.name].tolist()
    return [None if robust else search if right else Clean.name for robust, right in zip(correct, clean, strict=True)]


def _shorten(model: nn.Module, x: Tensor, point: Tensor, y: Tensor) -> Tensor:
    """Return an adversarial point between each image and its adversarial input, found by bisection."""
    shape = (-1, *(1,) * (x.dim() - 1))
    low, high, shortest = torch.zeros(len(x)).to(x), torch.ones(len(x)).to(x), point
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        between = contiguous((x + middle.view(shape) * (point - x)).clamp(0, 1))
        fooled = ~library.correct(model(between), y)
        low, high = torch.where(fooled, low, middle), torch.where(fooled, middle, high)
        shortest = torch.where(fooled.view(shape), between, shortest)
    return shortest
