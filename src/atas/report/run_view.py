"""A run as the page shows it: its summary, and its model and data, which are loaded on first use.

`Unavailable` is raised where model or data cannot be loaded. `Throughput` keeps what the page computes to
seconds.
"""

from __future__ import annotations

import time
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atas._utils.files import read_json
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

_SAMPLE = 16  # images that the pace is measured on
_MIN_IMAGES, _MAX_OVERRUN = 20, 4  # images that say anything, and how much longer than asked for they may take


class Unavailable(AtasError):  # noqa: N818  (the page goes on without it)
    """Something that a section needs is not there; the message is the sentence that stands in its place."""


class RunView:
    """One run. What is loaded is loaded when it is first asked for."""

    def __init__(self, summary: RunSummary, folder: Path, root: str | None = None) -> None:
        self.summary, self.recipe = summary, summary.recipe
        self.folder, self._root = RunFolder(folder), root
        self.environment: dict[str, Any] = read_json(self.folder.environment)

    @property
    def evaluation(self) -> Evaluation | None:
        """The result that the page is about."""
        return self.summary.evaluation

    @property
    def uses_python_objects(self) -> bool:
        """Whether model or data were objects of a Python program, which no command has."""
        return any(name.startswith(GIVEN) for name in (self.recipe.model.name, self.recipe.data.name))

    @property
    def evaluate_command(self) -> str:
        """What to type, or to write where model or data were objects."""
        if self.uses_python_objects:
            return f'atas.evaluate(model, x_test, y_test, threat).save("{self.folder.evaluation}"), in Python'
        return f"atas evaluate {shell_quote(self.folder.path)} --attacks pgd50,autoattack"

    @cached_property
    def data(self) -> Dataset:
        """The data that the run was trained on."""
        try:
            dataset = eval_view(load_data(self.recipe, self._root), self.recipe.data)
            if self.folder.model.exists():
                check_classes(read_weights(self.folder.model)[0].get("classes") or (), dataset.test.classes)
        except AtasError as error:
            raise Unavailable(f"The data is not at hand: {error}") from error
        return dataset

    @cached_property
    def model(self) -> nn.Module:
        """The trained model, in eval mode, on the GPU where there is one."""
        try:
            return Run.load(self.folder.path).model.to(select_device("auto"))
        except AtasError as error:
            raise Unavailable(f"The model is not at hand: {error}") from error

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @property
    def weights_differ(self) -> bool | None:
        """Whether the evaluation is of other weights than the run's; None where that cannot be told."""
        return self.summary.weights_differ

    @cached_property
    def test_split(self) -> tuple[Evaluation, Split]:
        """The evaluation, and the test images that its verdicts are of."""
        if self.evaluation is None:
            raise Unavailable(f"The run has not been evaluated: run {self.evaluate_command}")
        n, test = self.evaluation.n, self.data.test
        if n <= len(test):
            first = test.part(slice(n))
            if ChunkReader(open_source(first.images, first.labels), torch.float32).digest() == self.evaluation.data:
                return self.evaluation, first
        raise Unavailable("The test images at hand are not those of the evaluation: give their folder with --data")

    @cached_property
    def throughput(self) -> Throughput:
        """How fast this model is on this machine."""
        return Throughput(self.model, self.data.test.images[:_SAMPLE].to(self.device).float() / 255)


def evenly_spaced(length: int, count: int) -> Tensor:
    """At most so many places, evenly over the length: data may be sorted by class.

    >>> evenly_spaced(10, 4).tolist()
    [0, 3, 6, 9]
    """
    return torch.linspace(0, length - 1, min(count, length), dtype=torch.float64).round().long()


class Throughput:
    """Seconds that an image takes to go through the model and back."""

    def __init__(self, model: nn.Module, images: Tensor) -> None:
        labels = torch.zeros(len(images), dtype=torch.int64, device=images.device)
        with set_mode(model, training=False), freeze(model):
            for _ in range(2):  # the first warms up
                began = time.perf_counter()
                float(input_gradient(model, images, labels)[0].sum())
        self.seconds_per_image = (time.perf_counter() - began) / len(images)

    def max_images(self, passes: int, seconds: float, limit: int) -> int:
        """How many images can go so many times within about so many seconds, or a little longer where they are few."""
        count = int(seconds / (passes * self.seconds_per_image))
        if count < _MIN_IMAGES // _MAX_OVERRUN:
            raise Unavailable(
                "This takes minutes with this model on this machine: write the report where there is a GPU"
            )
        return min(limit, max(_MIN_IMAGES, count))
