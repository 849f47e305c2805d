"""What all export formats share: input, output, and the check of the exported model.

A format takes an `ExportSource` and returns a `FormatOutput`. `compare_outputs` raises an error if the exported model
has other logits than the original.
"""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atas import models
from atas._utils.formatting import first_line
from atas._utils.imports import GIVEN
from atas.core.autograd import eval_mode
from atas.core.fingerprint import weights_hash
from atas.errors import AtasError, DataError, UsageError
from atas.evaluation import Evaluation
from atas.evaluation.result import load_results
from atas.models.weights import read_weights
from atas.recipes import recipe_fingerprint
from atas.report.summary import select_results
from atas.report.verdict import Verdict, judge
from atas.training import Run
from atas.training.data import load_eval_data
from atas.training.metrics import first_collapse
from atas.training.run import RunFolder, load_recipe

METADATA_FORMAT = 1  # version of the metadata in exported files
_NUM_IMAGES = 32
_PASSES = 4  # that tell whether a model is random
_FIXED = "specialized it to be a constant"  # in torch.export's error for a number of images that became fixed
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_METADATA = ("shape", "classes", "num_classes", "channels", "mean", "std")  # of the weights; in cards and source code
_TOLERANCE = 1e-4  # of the largest logit; runtimes sum float32 in different orders


@dataclass(frozen=True)
class ExportSource:
    """A finished run with its model on the CPU, and the evaluations of exactly these weights."""

    run: Run
    model: nn.Module
    metadata: dict[str, Any]
    environment: dict[str, Any]
    evaluations: tuple[Evaluation, ...]

    @classmethod
    def load(cls, run: Run | str | Path, *, trust: bool = False) -> ExportSource:
        """Read a run's folder; `trust` is as in `Run.load`."""
        if not isinstance(run, Run):
            run = _load_run(Path(run), trust=trust)
        folder = RunFolder(run.folder)
        model = eval_mode(_copy_of(run.model).cpu())
        environment, weights = folder.read_environment(), weights_hash(model)
        saved, _ = read_weights(folder.model)
        missing = [key for key in _METADATA if key not in saved]
        if missing:
            raise DataError(
                f"the metadata of {folder.model} has no {missing[0]}; train again with this version of atas"
            )
        return cls(
            run,
            model,
            saved | _identity(run, model, environment, weights),
            environment,
            tuple(result for result in load_results(folder.path) if result.weights == weights),
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        channels, height, width = self.metadata["shape"]
        return channels, height, width

    @property
    def is_built_in(self) -> bool:
        """Whether the library can build the network from its name."""
        return self.run.recipe.model.name in models.names()

    @cached_property
    def is_random(self) -> bool:
        """Whether the model gives other logits for the same images in another pass, so nothing can be compared."""
        images = dummy_input(self.shape, 4)
        with torch.no_grad():
            first, *others = (self.model(images) for _ in range(_PASSES))
        return any(_difference(first, other) > _tolerance(first) for other in others)

    @property
    def traceable_model(self) -> nn.Module:
        """The network to trace: of a compiled one, the network that was compiled."""
        if isinstance(self.model, torch.jit.ScriptModule):
            raise AtasError(
                f"a model of torch.jit can be exported to safetensors only; load the run with the network that it was "
                f"made from: atas.Run.load({str(self.run.folder)!r}, model=network)"
            )
        original: nn.Module = getattr(self.model, "_orig_mod", self.model)
        return original

    @cached_property
    def results(self) -> list[Evaluation]:
        """The evaluations against the threat model of the training; the first is the one that the report quotes."""
        threat = self.run.recipe.threat
        of_threat = [result for result in self.evaluations if result.threat == threat]
        return select_results(of_threat, self.metadata["weights"], self.run.recipe)

    @property
    def result(self) -> Evaluation | None:
        """The evaluation to quote, the same as in the report."""
        return next(iter(self.results), None)

    @property
    def verdict(self) -> Verdict:
        """The worst case under attack, in the words of the report."""
        return judge(self.results)

    @property
    def collapse_epoch(self) -> int | None:
        """The first epoch, counted from 1, in which the monitor saw a collapse that the run kept."""
        return first_collapse(self.run.metrics)

    @property
    def seconds(self) -> float | None:
        """Seconds spent in training steps."""
        return float(self.run.metrics[-1]["seconds"]) if self.run.metrics else None

    def format_usage(self, template: str, **values: Any) -> str:
        """Fill the shape of an image and `values` into a usage text."""
        channels, height, width = self.shape
        return template.format(channels=channels, height=height, width=width, **values)


def _load_run(folder: Path, *, trust: bool) -> Run:
    if load_recipe(RunFolder(folder)).model.name.startswith(GIVEN):
        raise UsageError(
            f"the model of {folder} was passed in Python; export it there: "
            f"atas.export.write(atas.Run.load({str(folder)!r}, model=network), format)"
        )
    return Run.load(folder, trust=trust)


def _copy_of(model: nn.Module) -> nn.Module:
    try:
        with torch.no_grad():  # a scripted model's weights would become the copies' history
            return copy.deepcopy(model)
    except Exception as error:  # a network's own code and extensions may raise anything
        raise AtasError(
            f"the model of the run cannot be copied ({first_line(error)}); load the run with a new network: "
            f"atas.Run.load(folder, model=network)"
        ) from error


def _identity(run: Run, model: nn.Module, environment: dict[str, Any], weights: str) -> dict[str, Any]:
    """Return metadata beyond those of the weights file: recipe, code version and normalisation."""
    threat = run.recipe.threat
    metadata: dict[str, Any] = {
        "format": METADATA_FORMAT,
        "threat": repr(threat),
        "norm": threat.name,
        "eps": threat.eps,
        "recipe": run.recipe.name,
        "recipe_hash": recipe_fingerprint(run.recipe),
        "seed": run.recipe.training.seed,
        "weights": weights,
        "atas": environment.get("atas"),
        "commit": environment.get("commit"),
    }
    normalize = getattr(model, "normalize", None)
    if isinstance(normalize, models.Normalize):
        metadata |= {name: getattr(normalize, name).double().flatten().tolist() for name in ("mean", "std")}
    return metadata


def dummy_input(shape: tuple[int, int, int], count: int = 2) -> torch.Tensor:
    """Return random images to trace a model with. Two, since tracers specialise on a batch of one."""
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class OutputComparison:
    """Agreement of the exported model with the original: logits and predicted classes."""

    runtime: str
    images: str
    num_images: int
    same_class: int
    difference: float
    largest: float

    def __str__(self) -> str:
        return (
            f"checked in {self.runtime} on {self.num_images} {self.images}: logits differ from PyTorch's by at most "
            f"{self.difference:.1e} (largest logit {self.largest:.3g}), {self.same_class} predictions are the same"
        )


def compare_outputs(
    source: ExportSource, exported: Callable[[Tensor], Tensor], runtime: str, *, tolerance: float = _TOLERANCE
) -> OutputComparison | None:
    """Compare both models on the same images, the first alone and the others as a batch; raise if they differ.

    `tolerance` is relative to the largest logit. Return None for a random model.
    """
    if source.is_random:
        return None
    images, what = _images(source)
    with torch.no_grad():
        ours = _two_batches(source.model, images)
        try:
            theirs = _two_batches(exported, images)
        except Exception as error:  # a runtime may raise anything
            raise AtasError(
                f"the exported model cannot be run: in {runtime}, {_innermost(error)}; do not use it"
            ) from error
    largest, difference = float(ours.abs().max()), _difference(ours, theirs)
    if not difference <= _tolerance(ours, tolerance):
        raise AtasError(
            f"the exported model differs from PyTorch: in {runtime}, logits differ by {difference:.1e} (largest logit "
            f"{largest:.3g}); do not use it, and try other versions of the packages"
        )
    same = int((ours.argmax(1) == theirs.argmax(1)).sum())
    return OutputComparison(runtime, what, len(images), same, difference, largest)


def _two_batches(model: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    return torch.cat([model(images[:1]), model(images[1:])])


def _difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max()) if ours.shape == theirs.shape else float("nan")


def _tolerance(logits: Tensor, relative: float = _TOLERANCE) -> float:
    return relative * max(float(logits.abs().max()), 1.0)


def _images(source: ExportSource) -> tuple[Tensor, str]:
    """Return test images of the run's data, or random pixels if it cannot be loaded, and a description."""
    try:
        recipe = source.run.recipe
        images = load_eval_data(recipe).test.images[:_NUM_IMAGES].float() / 255
    except (AtasError, OSError):
        images = None
    if images is None or tuple(images.shape[1:]) != source.shape:
        return dummy_input(source.shape, _NUM_IMAGES), "images of random pixels (no test images found)"
    return images, f"test images of {source.run.recipe.data.label}"


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Silence the warnings of PyTorch's exporters about themselves and about optional packages."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


def tracing_error(form: str, error: Exception) -> AtasError:
    """Return the error for a model that a tracer refused, with its innermost reason."""
    if _FIXED in str(error):
        return fixed_batch_error(form)
    return AtasError(
        f"PyTorch cannot export this model {form} with a dynamic batch size ({_innermost(error)}); look for code in "
        f"its forward that depends on values or on the batch size"
    )


def fixed_batch_error(form: str) -> AtasError:
    """Return the error for a model whose forward fixes the number of images."""
    return AtasError(
        f"PyTorch cannot export this model {form} with a dynamic batch size: its forward fixes the number of images; "
        f"use x.shape[0] in place of len(x) there, or x.flatten(1)"
    )


def _innermost(error: BaseException) -> str:
    """Return the first line of the innermost cause of an error, without colours."""
    while error.__cause__ is not None:
        error = error.__cause__
    return _COLOURS.sub("", first_line(error))


@dataclass(frozen=True)
class FormatOutput:
    """Written files, a usage text for the model card, and the comparison with the original."""

    files: tuple[Path, ...]
    usage: str
    comparison: OutputComparison | None = None
    notes: tuple[str, ...] = ()
