"""Whether an exported model says the same as the model that it was made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from atas.errors import AtasError
from atas.export._source import Source, example
from atas.training.run import load_data
from atas.training.views import as_tested

_COUNT = 32
_TOLERANCE = 1e-4  # of the largest logit: float32 sums in another order


@dataclass(frozen=True)
class Check:
    """The largest difference between the logits of both, and on what it was measured."""

    against: str
    images: str
    count: int
    same: int
    difference: float
    largest: float

    def __str__(self) -> str:
        return (
            f"checked in {self.against} on {self.count} {self.images}: logits differ by at most {self.difference:.1e} "
            f"from PyTorch's (the largest is {self.largest:.3g}), the predicted class is the same on {self.same}"
        )


def check(source: Source, other: Callable[[Tensor], Tensor], against: str) -> Check:
    """Ask both about the same images, one alone and the others together; an error where they do not agree."""
    images, what = _images(source)
    with torch.no_grad():
        ours, theirs = (torch.cat([ask(images[:1]), ask(images[1:])]) for ask in (source.model, other))
    largest = float(ours.abs().max())
    difference = float((ours - theirs).abs().max()) if ours.shape == theirs.shape else float("nan")
    if not difference <= _TOLERANCE * max(largest, 1.0):
        raise AtasError(
            f"the exported model does not agree with PyTorch: in {against}, logits differ by {difference:.1e} where "
            f"the largest is {largest:.3g}; do not use it, and try other versions of the packages"
        )
    same = int((ours.argmax(1) == theirs.argmax(1)).sum())
    return Check(against, what, len(images), same, difference, largest)


def _images(source: Source) -> tuple[Tensor, str]:
    """Test images of the run's data where they are at hand, else random pixels; and which of them."""
    try:
        recipe = source.run.recipe
        images = as_tested(load_data(recipe, to_train=False), recipe.data).test.images[:_COUNT].float() / 255
    except (AtasError, OSError):
        images = None
    if images is None or tuple(images.shape[1:]) != source.shape:
        return example(source.shape, _COUNT), "images of random pixels (test images were not at hand)"
    return images, f"test images of {source.run.recipe.data.name}"
