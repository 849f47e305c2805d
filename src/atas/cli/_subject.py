"""What `atas evaluate` evaluates: the model of a run, a file of weights, or a model of the user's own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from torch import nn

from atas import data, models, threat
from atas._files import read_json
from atas.cli._bars import Bars
from atas.cli._options import Options
from atas.cli._place import place_of
from atas.cli._say import first_process
from atas.errors import UsageError
from atas.evaluation._classes import check_classes
from atas.report._expected import Expected, expected
from atas.training import Run
from atas.training.run import Folder, load_data
from atas.training.values import convert
from atas.training.views import as_tested
from atas.training.weights import load_weights, read_weights

_ATTACKS = ("pgd10", "pgd50")


@dataclass(frozen=True)
class Subject:
    """A model, the test images, what attacks may do, and where the result goes."""

    model: nn.Module
    test: data.Split
    threat: threat.Threat
    attacks: tuple[str, ...]
    batch_size: int | None
    out: Path
    expected: Expected | None = None


def of_run(run: Run, options: Options) -> Subject:
    """The model of a run on the run's test set, against the threat that it was trained for or another."""
    wanted, trained_for = run.recipe.evaluation, run.recipe.threat
    ball = threat.create(options.norm or trained_for.name, _eps(options, trained_for))
    with _bars() as bars:
        seen = as_tested(load_data(run.recipe, options.root, bars, to_train=False), run.recipe.data)
    _check_classes(Folder(run.folder).model, seen)
    examples, attacks = options.examples or wanted.examples, options.attacks_or(wanted.attacks)
    out = options.out or place_of(run, options.root, seen.test, examples, ball, attacks)
    test = seen.test.part(slice(examples))
    known = expected(run.recipe, read_json(Folder(run.folder).environment)) if ball == trained_for else None
    return Subject(run.model, test, ball, attacks, wanted.batch_size, out, known)


def of_model(options: Options) -> Subject:
    """A file of weights, or what a function of the user's returns."""
    assert options.data is not None
    ball = threat.create(options.norm or "linf", _eps(options, None))
    with _bars() as bars:
        lazy: Literal["train"] | None = "train" if options.data == "imagefolder" else None
        found = data.load(options.data, options.root, size=options.size, lazy=lazy, progress=bars)
    if options.weights is not None:
        _check_classes(options.weights, found)
    test = found.test.part(slice(options.examples))
    name = options.model
    if name is None:
        assert options.weights is not None
        model, stem = load_weights(options.weights), options.weights.stem
    else:
        mean, std = (_numbers(getattr(options, key), f"--{key}") for key in ("mean", "std"))
        model = models.create(name, found.num_classes, found.shape[0], mean, std).eval()
        if options.weights is not None:
            load_weights(options.weights, model)
        stem = options.weights.stem if options.weights is not None else name.replace(":", ".")
    folder = options.weights.parent if options.weights is not None else Path()
    attacks = options.attacks_or(_ATTACKS)
    return Subject(model, test, ball, attacks, None, options.out or folder / f"{stem}-evaluation.json")


def _check_classes(weights: Path, found: data.Dataset) -> None:
    """Labels of other data may be of other classes than the weights' outputs."""
    about, _ = read_weights(weights)
    check_classes(about.get("classes") or (), found.test.classes)


def _bars() -> Bars:
    """How far the decoding of images is, shown by the first of several processes."""
    return Bars(Console(stderr=True, quiet=not first_process()))


def _eps(options: Options, trained_for: threat.Threat | None) -> float:
    if options.eps is not None:
        return float(convert(options.eps, float, "--eps"))
    if trained_for is None or options.norm not in (None, trained_for.name):
        threat.create(options.norm or "linf", 0)  # a wrong name is told first
        raise UsageError(f"--norm {options.norm} needs a budget of its own; give it with --eps")
    return trained_for.eps


def _numbers(text: str | None, option: str) -> tuple[float, ...] | float | None:
    """One number, or one a channel."""
    if text is None:
        return None
    found = tuple(float(convert(part.strip(), float, option)) for part in text.split(","))
    return found[0] if len(found) == 1 else found
