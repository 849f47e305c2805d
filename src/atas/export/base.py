"""What every export format shares: what it gets, what it returns, and the check of the exported model.

A format gets an `ExportSource` and returns a `FormatOutput`. `compare_outputs` raises an error where the logits of the
exported model are not those of the original.
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
from atas._utils.files import read_json
from atas.core.fingerprint import weights_hash
from atas.errors import AtasError, DataError
from atas.evaluation import Evaluation
from atas.evaluation.result import load_results
from atas.models.weights import read_weights
from atas.recipes import recipe_fingerprint
from atas.training import Run
from atas.training.data import load_eval_data
from atas.training.run import RunFolder

METADATA_FORMAT = 1  # of what the files say about their model
_NUM_IMAGES = 32
_TOLERANCE = 1e-4  # of the largest logit: float32 sums in another order


@dataclass(frozen=True)
class ExportSource:
    """A finished run with the model on the CPU, and what was measured of exactly these weights."""

    run: Run
    model: nn.Module
    metadata: dict[str, Any]
    environment: dict[str, Any]
    evaluations: tuple[Evaluation, ...]

    @classmethod
    def load(cls, run: Run | str | Path) -> ExportSource:
        """Read what lies in the run's folder."""
        if not isinstance(run, Run):
            run = Run.load(run)
        folder = RunFolder(run.folder)
        model = copy.deepcopy(run.model).cpu().eval()
        environment, weights = read_json(folder.environment), weights_hash(model)
        saved, _ = read_weights(folder.model)
        if "shape" not in saved or "classes" not in saved:
            raise DataError(
                f"{folder.model} does not say which images it is for; train again with this version of atas"
            )
        return cls(
            run,
            model,
            saved | _identity(run, model, environment, weights),
            environment,
            tuple(found for found in load_results(folder.path) if found.weights == weights),
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
        """The evaluation against the threat that the model was trained for: with AutoAttack if there is one, then on
        the most images."""
        same = [found for found in self.evaluations if found.threat == self.run.recipe.threat]
        return max(same, key=lambda found: ("autoattack" in found.accuracy, found.n), default=None)

    @property
    def collapse_epoch(self) -> int | None:
        """The first epoch, counted from 1, that the monitor found collapsed and the run kept."""
        return next((row["epoch"] + 1 for row in self.run.metrics if row.get("collapsed")), None)

    @property
    def seconds(self) -> float | None:
        """Time spent in training steps."""
        return float(self.run.metrics[-1]["seconds"]) if self.run.metrics else None


def _identity(run: Run, model: nn.Module, environment: dict[str, Any], weights: str) -> dict[str, Any]:
    """What a file says besides what the training wrote: which recipe, which code, and the constants as they are."""
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
    """Pixels to trace a model with; two images, as one would fix the batch at one."""
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class OutputComparison:
    """The largest difference between the logits of both, and on what it was measured."""

    runtime: str
    images: str
    num_images: int
    same_class: int
    difference: float
    largest: float

    def __str__(self) -> str:
        return (
            f"checked in {self.runtime} on {self.num_images} {self.images}: logits differ by at most "
            f"{self.difference:.1e} from PyTorch's (the largest is {self.largest:.3g}), the predicted class "
            f"is the same on {self.same_class}"
        )


def compare_outputs(source: ExportSource, exported: Callable[[Tensor], Tensor], runtime: str) -> OutputComparison:
    """Ask both about the same images, one alone and the others together; an error where they do not agree."""
    images, what = _images(source)
    with torch.no_grad():
        ours, theirs = (torch.cat([ask(images[:1]), ask(images[1:])]) for ask in (source.model, exported))
    largest = float(ours.abs().max())
    difference = float((ours - theirs).abs().max()) if ours.shape == theirs.shape else float("nan")
    if not difference <= _TOLERANCE * max(largest, 1.0):
        raise AtasError(
            f"the exported model does not agree with PyTorch: in {runtime}, logits differ by {difference:.1e} where "
            f"the largest is {largest:.3g}; do not use it, and try other versions of the packages"
        )
    same = int((ours.argmax(1) == theirs.argmax(1)).sum())
    return OutputComparison(runtime, what, len(images), same, difference, largest)


def _images(source: ExportSource) -> tuple[Tensor, str]:
    """Test images of the run's data where they are at hand, else random pixels; and which of them."""
    try:
        recipe = source.run.recipe
        images = load_eval_data(recipe).test.images[:_NUM_IMAGES].float() / 255
    except (AtasError, OSError):
        images = None
    if images is None or tuple(images.shape[1:]) != source.shape:
        return dummy_input(source.shape, _NUM_IMAGES), "images of random pixels (test images were not at hand)"
    return images, f"test images of {source.run.recipe.data.name}"


@dataclass(frozen=True)
class FormatOutput:
    """The files, how to load them (for the card), and how they were checked."""

    files: tuple[Path, ...]
    usage: str
    comparison: OutputComparison | None = None
    notes: tuple[str, ...] = ()
