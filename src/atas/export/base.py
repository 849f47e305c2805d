"""What all export formats share: input, output, and the check of the exported model.

A format takes an `ExportSource` and returns a `FormatOutput`. `compare_outputs` raises an error if the exported model
has other logits than the original.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atas import models
from atas.core.autograd import eval_mode
from atas.core.fingerprint import weights_hash
from atas.errors import AtasError, DataError
from atas.evaluation import Evaluation
from atas.evaluation.result import load_results
from atas.models.weights import read_weights
from atas.recipes import recipe_fingerprint
from atas.report.summary import first_collapse, strongest_result
from atas.training import Run
from atas.training.data import load_eval_data
from atas.training.run import RunFolder

METADATA_FORMAT = 1  # version of the metadata in exported files
_NUM_IMAGES = 32
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
            run = Run.load(run, trust=trust)
        folder = RunFolder(run.folder)
        model = eval_mode(copy.deepcopy(run.model).cpu())
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
    def result(self) -> Evaluation | None:
        """The strongest evaluation against the threat model of the training."""
        return strongest_result(result for result in self.evaluations if result.threat == self.run.recipe.threat)

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


def compare_outputs(source: ExportSource, exported: Callable[[Tensor], Tensor], runtime: str) -> OutputComparison:
    """Compare both models on the same images, the first alone and the others as a batch; raise if they differ."""
    images, what = _images(source)
    with torch.no_grad():
        ours, theirs = (torch.cat([model(images[:1]), model(images[1:])]) for model in (source.model, exported))
    largest = float(ours.abs().max())
    difference = float((ours - theirs).abs().max()) if ours.shape == theirs.shape else float("nan")
    if not difference <= _TOLERANCE * max(largest, 1.0):
        raise AtasError(
            f"the exported model differs from PyTorch: in {runtime}, logits differ by {difference:.1e} (largest logit "
            f"{largest:.3g}); do not use it, and try other versions of the packages"
        )
    same = int((ours.argmax(1) == theirs.argmax(1)).sum())
    return OutputComparison(runtime, what, len(images), same, difference, largest)


def _images(source: ExportSource) -> tuple[Tensor, str]:
    """Return test images of the run's data, or random pixels if it cannot be loaded, and a description."""
    try:
        recipe = source.run.recipe
        images = load_eval_data(recipe).test.images[:_NUM_IMAGES].float() / 255
    except (AtasError, OSError):
        images = None
    if images is None or tuple(images.shape[1:]) != source.shape:
        return dummy_input(source.shape, _NUM_IMAGES), "images of random pixels (no test images found)"
    return images, f"test images of {source.run.recipe.data.name}"


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@dataclass(frozen=True)
class FormatOutput:
    """Written files, a usage text for the model card, and the comparison with the original."""

    files: tuple[Path, ...]
    usage: str
    comparison: OutputComparison | None = None
    notes: tuple[str, ...] = ()
