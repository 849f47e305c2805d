"""The cost of the monitor: how many images it probes, and after which epochs.

The cost is counted in passes of the network and not measured, so a run repeats to the bit on any machine.
"""

from __future__ import annotations

from fractions import Fraction

from atas.recipes import DataConfig, Recipe
from atas.training.data import train_resolution

_SHARE = Fraction(1, 4)  # of the cost of an epoch's training steps
_MAX_IMAGES = 1000
_MIN_IMAGES = 64  # with fewer, the accuracy is too coarse to tell a collapse from a bad epoch
_MAX_HELD_OUT = Fraction(1, 5)  # of the images, if the probed ones are not trained on

# Costs for an image in forward passes. A backward pass costs two, and one if it computes input gradients only.
_PROBE_COST = 11 * 2 + 3  # the gradients of PGD-10 and FGSM, and the verdicts on clean image, FGSM and PGD-10
_STEP_COST = 3
_ADVERSARIAL_STEP_COST = 5  # of the fastest attack, one gradient; other methods cost at least that


def resolve_probe(recipe: Recipe, examples: int) -> Recipe:
    """Return the recipe with numbers in place of `training.probe = "auto"`, for a training set of this size.

    The monitor then takes at most a quarter of the time of the training steps. Where that would leave too few images to
    detect a collapse, it probes after every k-th epoch only.
    """
    training = recipe.training
    if training.probe != "auto":
        return recipe
    budget = _SHARE * _epoch_cost(recipe, examples) / _PROBE_COST  # in images for each epoch
    most = min(_MAX_IMAGES, examples if training.on_collapse == "warn" else max(1, int(_MAX_HELD_OUT * examples)))
    images = min(most, max(_MIN_IMAGES, int(budget * (training.probe_every or 1))))
    every = training.probe_every or -(-images // budget)
    return recipe.with_values({"training.probe": images, "training.probe_every": every if every > 1 else None})


def _epoch_cost(recipe: Recipe, examples: int) -> Fraction:
    """Return the cost of an epoch's training steps, in forward passes of an image of the size that is probed."""
    method = recipe.method_class
    step = _STEP_COST if method is not None and not method.adversarial else _ADVERSARIAL_STEP_COST
    return step * examples * _mean_area(recipe.data, recipe.training.epochs)


def _mean_area(data: DataConfig, epochs: int) -> Fraction:
    """Return the mean area of training images over the epochs, as a share of the area that is probed."""
    size = data.eval_resolution
    if size is None or data.view_start is None:
        return Fraction(1)
    sides = [train_resolution(data, epoch, epochs) or size for epoch in range(epochs)]
    return Fraction(sum(side**2 for side in sides), epochs * size**2)
