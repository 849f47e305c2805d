"""The target of `atas evaluate`, and the file for its result.

A target is the model of a run, a file of weights, or a model from user code. A result replaces an earlier one of the
run only if it has at least as many images and attacks as strong.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from rich.console import Console
from torch import nn

from atas import data, models, threat
from atas._utils.console import DataProgress, is_rank0
from atas._utils.formatting import describe_failure
from atas.cli.evaluate import EvaluateOptions
from atas.cli.options import parse_list
from atas.core.autograd import eval_mode
from atas.data.decode import open_image
from atas.errors import DataError, UsageError, first_few, unknown
from atas.evaluation import Evaluation
from atas.evaluation.inputs import check_classes, data_hash, describe_mask
from atas.models import published
from atas.models.weights import load_weights, read_weights
from atas.recipes.expected import Expected, find_expected
from atas.recipes.values import parse_value
from atas.threat import Threat
from atas.training import Run
from atas.training.data import load_eval_data
from atas.training.run import ROWS_KEY, RunFolder

_DEFAULT_ATTACKS = ("pgd10", "pgd50")
_AUTOATTACK = "autoattack"
_FOLDER_DATA = ("imagefolder", "packed")  # other sets by name have the same content everywhere
_WHITE = 127  # pixels of a mask that are brighter may change


@dataclass(frozen=True)
class Target:
    """A model, test images, threat model, attacks with their settings, and the path of the result.

    With `keeps_better`, an earlier result at the path is kept if it is better than this one will be. The command's
    `options` hold the settings that do not depend on the model.
    """

    model: nn.Module
    test: data.Split
    threat: threat.Threat
    attacks: tuple[str, ...]
    step_size: float | None
    batch_size: int | None
    out: Path
    options: EvaluateOptions
    expected: Expected | None = None
    keeps_better: bool = False
    target_class: int | None = None

    def result_path(self) -> Path:
        """Return the path to write now; other evaluations may change it."""
        if not self.keeps_better:
            return self.out
        path = _path_of_mask(self.out, self.threat)
        return _keep_better(path, len(self.test.labels), self.attacks, bool(self.options.corruptions))

    def damage(self, path: Path) -> str | None:
        """Return what is wrong with the earlier result at the path, if it cannot be read and so is not kept."""
        try:
            if self.keeps_better and path.exists():
                Evaluation.load(path, details=False)
        except DataError as error:
            return str(error)
        return None


def from_run(run: Run, options: EvaluateOptions) -> Target:
    """Evaluate the model of a run on its test set, under its own threat model or another."""
    config, trained_for = run.recipe.evaluation, run.recipe.threat
    attack_threat = threat.create(options.norm or trained_for.name, _eps(options, trained_for))
    step_size = _step_size(options)
    with _data_progress(options.quiet) as progress:
        skipped = RunFolder(run.folder).read_skipped() if options.root is None else None
        dataset = load_eval_data(run.recipe, options.root, progress, skipped=skipped)
    _check_classes(RunFolder(run.folder).model, dataset)
    examples, attacks = options.examples or config.examples, options.attacks_or_default(config.attacks)
    target_class = _target_class(options.target_class, dataset.test.classes)
    is_curve = options.curve is not None and attack_threat.name == trained_for.name  # it has several budgets
    named_threat = trained_for if is_curve else attack_threat
    out = options.out or _question_path(output_path(run, options.root, dataset.test, named_threat), options)
    test = dataset.test.part(slice(examples))
    expectation = (
        find_expected(run.recipe, on_subset=ROWS_KEY in RunFolder(run.folder).read_environment())
        if attack_threat == trained_for
        else None
    )
    return Target(
        model=run.model,
        test=test,
        threat=_mask(attack_threat, options.mask, test),
        attacks=attacks,
        step_size=step_size,
        batch_size=options.batch_size or config.batch_size,
        out=out,
        options=options,
        expected=expectation,
        keeps_better=options.out is None and options.curve is None,
        target_class=target_class,
    )


def from_model(options: EvaluateOptions) -> Target:
    """Evaluate a file of weights, or the model that a user's function returns."""
    assert options.data is not None
    attack_threat = threat.create(options.norm or "linf", _eps(options, None))
    step_size = _step_size(options)
    is_folder = data.find_source(options.data, options.root).kind in data.FOLDERS
    weights = None if options.weights is None else _locate(options.weights, options.quiet)
    size = _trained_size(weights) if options.size is None and is_folder and weights is not None else options.size
    with _data_progress(options.quiet) as progress:
        lazy: Literal["train"] | None = "train" if is_folder else None
        dataset = data.load(
            options.data, options.root, size=size, lazy=lazy, test_only=True, progress=progress, trusted=True
        )
    if weights is not None:
        _check_classes(weights, dataset)
    test = dataset.test.part(slice(options.examples))
    name = options.model
    if name is None:
        assert weights is not None
        model = load_weights(weights, trust=options.trust)
    else:
        mean, std = (_numbers(getattr(options, key), f"--{key}") for key in ("mean", "std"))
        channels, *sides = dataset.shape
        model = eval_mode(models.create(name, dataset.num_classes, channels, mean, std, size=sides, trusted=True))
        if weights is not None:
            load_weights(weights, model)
    attacks = options.attacks_or_default(_DEFAULT_ATTACKS)
    out = options.out or _question_path(_path_of_result(options), options)
    target_class = _target_class(options.target_class, dataset.test.classes)
    return Target(
        model=model,
        test=test,
        threat=_mask(attack_threat, options.mask, test),
        attacks=attacks,
        step_size=step_size,
        batch_size=options.batch_size,
        out=out,
        options=options,
        target_class=target_class,
    )


def _target_class(text: str | None, classes: Sequence[str]) -> int | None:
    """Return the number of a class that is given by its name or its number."""
    if text is None or text in classes:
        return None if text is None else list(classes).index(text)
    if text.isascii() and text.isdigit() and int(text) < len(classes):
        return int(text)
    raise unknown("class", text, classes, f"Classes have the names {first_few(classes)}, or numbers from 0")


def _mask(attack_threat: Threat, path: Path | None, test: data.Split) -> Threat:
    """Return the threat model in which only pixels that are white in an image file may change."""
    if path is None:
        return attack_threat
    size = tuple(test.images.shape[-2:])
    try:
        with open_image(path) as file:
            pixels = np.asarray(file.convert("L"))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the mask {path}: {describe_failure(error)}; pass an image file") from error
    if pixels.shape != size:
        raise DataError(
            f"the mask {path} is {pixels.shape[1]} x {pixels.shape[0]} pixels, the images are {size[1]} x {size[0]}: "
            f"resize it"
        )
    if not (white := torch.tensor(pixels > _WHITE)).any():
        raise DataError(f"the mask {path} has no white pixel; paint the pixels that may change white")
    return attack_threat.masked(white)


def _question_path(path: Path, options: EvaluateOptions) -> Path:
    """Return a path of its own for a result that answers another question than robust accuracy."""
    if options.target_class is not None:
        name = re.sub(r"[^\w.-]+", "-", options.target_class)
        path = path.with_name(f"target-{name}-{path.name}")
    if options.curve is not None:
        path = path.with_name(f"curve-{path.name}")
    if options.mask is not None:
        path = path.with_name(f"masked-{path.name}")
    return path


def _locate(weights: Path, quiet: bool) -> Path:
    """Return the path of a file of weights, which may be given by its folder or by the name of a published model."""
    if not published.is_name(str(weights)):
        return weights / published.FILE if published.is_repository(weights) else weights
    with _data_progress(quiet) as progress:
        return published.locate(str(weights), progress=progress)


def _path_of_result(options: EvaluateOptions) -> Path:
    """Return the path of the result: beside a file of weights, or in the current folder for a model by name."""
    if options.weights is not None and not published.is_name(str(options.weights)):
        return options.weights.with_name(f"{options.weights.stem}-evaluation.json")
    name = str(options.weights or options.model).replace(":", ".").replace("/", ".")
    return Path(f"{name}-evaluation.json")


def _check_classes(weights: Path, dataset: data.Dataset) -> None:
    """Raise an error if the data has other classes than the weights."""
    metadata, _ = read_weights(weights)
    check_classes(metadata.get("classes") or (), dataset.test.classes)


def _trained_size(weights: Path) -> int | None:
    """Return the side of the square images that weights were trained on; None if their file does not say it."""
    metadata, _ = read_weights(weights)
    _, height, width = metadata.get("shape", (0, 0, None))
    return height if height == width else None


def _data_progress(quiet: bool) -> DataProgress:
    """Return a display of the decoding of images, quiet on other ranks than 0."""
    return DataProgress(Console(stderr=True, quiet=quiet or not is_rank0()))


def _eps(options: EvaluateOptions, trained_for: threat.Threat | None) -> float:
    if options.curve is not None:
        return max(budgets(options.curve))
    if options.eps is not None:
        return float(parse_value(options.eps, float, "--eps"))
    if trained_for is None or options.norm not in (None, trained_for.name):
        threat.create(options.norm or "linf", 0)  # reports a wrong norm first
        raise UsageError(f"--norm {options.norm} needs a budget; pass --eps")
    return trained_for.eps


def _step_size(options: EvaluateOptions) -> float | None:
    return None if options.step_size is None else float(parse_value(options.step_size, float, "--step-size"))


def budgets(text: str) -> tuple[float, ...]:
    """Parse the budgets of a curve."""
    found = parse_list("curve", text, lambda part: float(parse_value(part, float, "--curve")))
    assert found is not None
    return found


def _numbers(text: str | None, option: str) -> tuple[float, ...] | float | None:
    """Parse one number, or one for each channel."""
    if text is None:
        return None
    numbers = tuple(float(parse_value(part.strip(), float, option)) for part in text.split(","))
    return numbers[0] if len(numbers) == 1 else numbers


def output_path(run: Run, root: str | None, test: data.Split, threat: Threat) -> Path:
    """Return the path of the run's evaluation, or one next to it that names other data or another budget.

    `test` is the whole test set in `root`. `atas export` ignores files whose name does not begin with the evaluation's.
    """
    path = RunFolder(run.folder).evaluation
    if root is not None and _is_other_data(run, root, test):
        path = path.with_name(f"{Path(root).resolve().name}-{path.name}")
    if threat != run.recipe.threat:
        path = path.with_name(f"{path.stem}-{threat.name}-{threat.eps:.4g}.json")
    return path


def _is_other_data(run: Run, root: str, test: data.Split) -> bool:
    """Return whether the images differ from the run's, by its earlier result or by its data directory.

    If neither exists, the data is assumed to have moved.
    """
    config = run.recipe.data
    if config.name in data.names() and config.name not in _FOLDER_DATA:
        return False
    if earlier := _earlier_result(RunFolder(run.folder).evaluation):
        first = test.part(slice(earlier.n))
        return data_hash(first.images, first.labels) != earlier.data
    try:
        if data.find_source(config.name, root).kind in ("function", "hub"):
            return False
        own, other = (_fingerprint(config.name, folder, config.size) for folder in (config.root, root))
    except DataError:
        return False
    return own != other


def _fingerprint(name: str, root: str | None, size: int | None) -> str:
    """Return the fingerprint of a folder's test images without decoding them."""
    size, lazy = (size, True) if data.find_source(name, root).kind in data.FOLDERS else (None, None)
    return data.load(name, root, size=size, lazy=lazy, test_only=True, trusted=False).test.fingerprint()


def _path_of_mask(path: Path, attack_threat: Threat) -> Path:
    """Return `path`, or one next to it if `path` holds a result with another mask."""
    mask, earlier = describe_mask(attack_threat), _earlier_result(path)
    if mask is None or earlier is None or (earlier.protocol.get("mask") or mask)["hash"] == mask["hash"]:
        return path
    return path.with_name(f"{path.stem}-{mask['hash'][:8]}.json")


def _keep_better(path: Path, n: int, attacks: tuple[str, ...], corruptions: bool) -> Path:
    """Return `path`, or one next to it if `path` holds a result on more images, with AutoAttack or with corruptions."""
    earlier = _earlier_result(path)
    if earlier is None:
        return path
    if n < earlier.n:
        suffix = str(n)
    elif _AUTOATTACK in earlier.accuracy and _AUTOATTACK not in attacks:
        suffix = "-".join(attacks)
    elif earlier.corruptions and not corruptions:
        suffix = "-".join(attacks) or "clean"
    else:
        return path
    return _keep_better(path.with_name(f"{path.stem}-{suffix}.json"), n, attacks, corruptions)


def _earlier_result(path: Path) -> Evaluation | None:
    """Return the result in a file; None if there is none, or if it is damaged and will be replaced."""
    if not path.exists():
        return None
    try:
        return Evaluation.load(path, details=False)
    except DataError:
        return None
