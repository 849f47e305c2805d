"""A run as the page sees it: what its folder tells, and its model and data where they are at hand."""

from __future__ import annotations

import time
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atas._files import read_json
from atas._text import in_shell
from atas.data import Dataset, Split
from atas.errors import AtasError
from atas.evaluation import Evaluation
from atas.evaluation._classes import check_classes
from atas.evaluation._data import open_source
from atas.evaluation._portions import Reader
from atas.passes import frozen, input_gradient, mode
from atas.report._compare import Summary
from atas.training import Run
from atas.training.engine import choose_device
from atas.training.run import Folder, load_data
from atas.training.views import as_tested
from atas.training.weights import GIVEN, read_weights

_SAMPLE = 16  # images that the pace is measured on
_FEWEST, _LONGER = 20, 4  # images that say anything, and how much longer than asked for they may take


class NotAtHand(AtasError):  # noqa: N818  (the page goes on without it)
    """Something that a section needs is not there; the message is the sentence that stands in its place."""


class Subject:
    """One run. What is loaded is loaded when it is first asked for."""

    def __init__(self, summary: Summary, folder: Path, root: str | None = None) -> None:
        self.summary, self.recipe = summary, summary.recipe
        self.place, self._root = Folder(folder), root
        self.environment: dict[str, Any] = read_json(self.place.environment)

    @property
    def evaluation(self) -> Evaluation | None:
        """The result that the page is about."""
        return self.summary.evaluation

    @property
    def of_python(self) -> bool:
        """Whether model or data were objects of a Python program, which no command has."""
        return any(name.startswith(GIVEN) for name in (self.recipe.model.name, self.recipe.data.name))

    @property
    def to_evaluate(self) -> str:
        """What to type, or to write where model or data were objects."""
        if self.of_python:
            return f'atas.evaluate(model, x_test, y_test, threat).save("{self.place.evaluation}"), in Python'
        return f"atas evaluate {in_shell(self.place.path)} --attacks pgd50,autoattack"

    @cached_property
    def data(self) -> Dataset:
        """The data that the run was trained on."""
        try:
            found = as_tested(load_data(self.recipe, self._root), self.recipe.data)
            if self.place.model.exists():
                check_classes(read_weights(self.place.model)[0].get("classes") or (), found.test.classes)
        except AtasError as error:
            raise NotAtHand(f"The data is not at hand: {error}") from error
        return found

    @cached_property
    def model(self) -> nn.Module:
        """The trained model, in eval mode, on the GPU where there is one."""
        try:
            return Run.load(self.place.path).model.to(choose_device("auto"))
        except AtasError as error:
            raise NotAtHand(f"The model is not at hand: {error}") from error

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @property
    def weights_differ(self) -> bool | None:
        """Whether the evaluation is of other weights than the run's; None where that cannot be told."""
        return self.summary.weights_differ

    @cached_property
    def tested(self) -> tuple[Evaluation, Split]:
        """The evaluation, and the test images that its verdicts are of."""
        if self.evaluation is None:
            raise NotAtHand(f"The run has not been evaluated: run {self.to_evaluate}")
        n, test = self.evaluation.n, self.data.test
        if n <= len(test):
            first = test.part(slice(n))
            if Reader(open_source(first.images, first.labels), torch.float32).digest() == self.evaluation.data:
                return self.evaluation, first
        raise NotAtHand("The test images at hand are not those of the evaluation: give their folder with --data")

    @cached_property
    def pace(self) -> Pace:
        """How fast this model is on this machine."""
        return Pace(self.model, self.data.test.images[:_SAMPLE].to(self.device).float() / 255)


def evenly(length: int, count: int) -> Tensor:
    """At most so many places, evenly over the length: data may be sorted by class.

    >>> evenly(10, 4).tolist()
    [0, 3, 6, 9]
    """
    return torch.linspace(0, length - 1, min(count, length), dtype=torch.float64).round().long()


class Pace:
    """Seconds that an image takes to go through the model and back."""

    def __init__(self, model: nn.Module, images: Tensor) -> None:
        labels = torch.zeros(len(images), dtype=torch.int64, device=images.device)
        with mode(model, training=False), frozen(model):
            for _ in range(2):  # the first warms up
                began = time.perf_counter()
                float(input_gradient(model, images, labels)[0].sum())
        self.seconds = (time.perf_counter() - began) / len(images)

    def images(self, passes: int, seconds: float, most: int) -> int:
        """How many images can go so many times within about so many seconds, or a little longer where they are few."""
        count = int(seconds / (passes * self.seconds))
        if count < _FEWEST // _LONGER:
            raise NotAtHand("This takes minutes with this model on this machine: write the report where there is a GPU")
        return min(most, max(_FEWEST, count))
