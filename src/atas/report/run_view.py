"""A run as the page shows it: its summary, and its model and data, which are loaded on first use.

`Unavailable` is raised if model or data cannot be loaded. `Throughput` limits the measurements to seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from atas._utils.formatting import shell_quote
from atas.core.autograd import freeze, input_gradient, set_mode
from atas.data import Dataset, Split
from atas.distributed.world import select_device
from atas.errors import AtasError
from atas.evaluation import Evaluation
from atas.evaluation.inputs import ChunkReader, check_classes, open_source
from atas.models.weights import GIVEN, read_weights
from atas.report.summary import RunSummary
from atas.training import Run
from atas.training.data import eval_view, load_data
from atas.training.run import RunFolder

T = TypeVar("T")

_THROUGHPUT_IMAGES = 16
_MIN_IMAGES, _MAX_OVERRUN = 20, 4  # fewer images mean nothing; they may take this many times as long as allowed


class Unavailable(AtasError):  # noqa: N818  (the page is written without it)
    """Model or data that a section needs are missing; the page shows the message instead of the section."""


def or_unavailable(make: Callable[[], T]) -> T | Unavailable:
    """Return the result of `make`, or the error if model or data are unavailable."""
    try:
        return make()
    except Unavailable as error:
        return error


@dataclass(frozen=True)
class SampleSizes:
    """How many images the page attacks, at most; a slow model gets fewer."""

    gallery: int = 24
    confusion: int = 10_000
    norm_deciles: int = 2000


class RunView:
    """One run. Model and data are loaded on first use."""

    def __init__(
        self,
        summary: RunSummary,
        folder: Path,
        root: str | None = None,
        sample_sizes: SampleSizes | None = None,
        *,
        trust: bool = False,
    ) -> None:
        self.summary, self.recipe = summary, summary.recipe
        self.sample_sizes = sample_sizes or SampleSizes()
        self.folder, self._root, self._trust = RunFolder(folder), root, trust
        self.environment: dict[str, Any] = self.folder.read_environment()

    @property
    def evaluation(self) -> Evaluation | None:
        """The result to show."""
        return self.summary.evaluation

    @property
    def uses_python_objects(self) -> bool:
        """Whether model or data were Python objects, which the command cannot load."""
        return any(name.startswith(GIVEN) for name in (self.recipe.model.name, self.recipe.data.name))

    @property
    def evaluate_command(self) -> str:
        """The command that evaluates the run, or the Python call if model or data were Python objects."""
        if self.uses_python_objects:
            return f'atas.evaluate(model, x_test, y_test, threat).save("{self.folder.evaluation}"), in Python'
        return f"atas evaluate {shell_quote(self.folder.path)} --attacks pgd50,autoattack"

    @cached_property
    def data(self) -> Dataset:
        """The data set that the run was trained on."""
        try:
            dataset = eval_view(load_data(self.recipe, self._root), self.recipe.data)
            if self.folder.model.exists():
                check_classes(read_weights(self.folder.model)[0].get("classes") or (), dataset.test.classes)
        except AtasError as error:
            raise Unavailable(f"Cannot load the data: {error}") from error
        return dataset

    @cached_property
    def model(self) -> nn.Module:
        """The trained model, in eval mode, on the GPU if there is one."""
        try:
            return Run.load(self.folder.path, trust=self._trust).model.to(select_device("auto"))
        except AtasError as error:
            raise Unavailable(f"Cannot load the model: {error}") from error

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.model.parameters()).device

    @property
    def weights_differ(self) -> bool | None:
        """Whether the evaluation used other weights than the run's; None if unknown."""
        return self.summary.weights_differ

    @cached_property
    def test_split(self) -> tuple[Evaluation, Split]:
        """The evaluation and its test images."""
        if self.evaluation is None:
            raise Unavailable(f"The run has not been evaluated: run {self.evaluate_command}")
        n, test = self.evaluation.n, self.data.test
        if n <= len(test):
            first = test.part(slice(n))
            if ChunkReader(open_source(first.images, first.labels), torch.float32).digest() == self.evaluation.data:
                return self.evaluation, first
        raise Unavailable("The test images are not those of the evaluation: pass their folder with --data")

    @cached_property
    def throughput(self) -> Throughput:
        """The speed of the model on this machine."""
        return Throughput(self.model, self.data.test.images[:_THROUGHPUT_IMAGES].to(self.device).float() / 255)


def evenly_spaced(length: int, count: int) -> Tensor:
    """Return at most `count` indices, evenly spaced, since data may be sorted by class.

    >>> evenly_spaced(10, 4).tolist()
    [0, 3, 6, 9]
    """
    return torch.linspace(0, length - 1, min(count, length), dtype=torch.float64).round().long()


class Throughput:
    """Seconds per image of a forward and backward pass."""

    def __init__(self, model: nn.Module, images: Tensor) -> None:
        labels = torch.zeros(len(images), dtype=torch.int64, device=images.device)
        with set_mode(model, training=False), freeze(model):
            for _ in range(2):  # the first warms up
                began = time.perf_counter()
                float(input_gradient(model, images, labels)[0].sum())
        self.seconds_per_image = (time.perf_counter() - began) / len(images)

    def max_images(self, passes: int, seconds: float, limit: int) -> int:
        """Return how many images fit `passes` forward and backward passes into `seconds`, at most `limit`."""
        count = int(seconds / (passes * self.seconds_per_image))
        if count < _MIN_IMAGES // _MAX_OVERRUN:
            raise Unavailable("Too slow on this device: run atas report on a GPU")
        return min(limit, max(_MIN_IMAGES, count))
