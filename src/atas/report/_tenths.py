"""Training examples by their gradient norm: how each tenth stands under attack, and which are at the ends."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from atas import attacks
from atas.errors import AtasError
from atas.evaluation import wilson
from atas.passes import frozen, input_gradient, mode
from atas.report._subject import NotAtHand, Subject, evenly
from atas.threat import l2_norm
from atas.training import checkpoint
from atas.training._checks import split_probe

_MOST = 2000
_SECONDS = 10.0
_PASSES = 12  # of PGD-10, with the verdict and the clean image
_BATCH = 250
_PARTS = 10


@dataclass(frozen=True)
class Norms:
    """The gradient norm of training examples, numbered as in the data, and the step size where a method has one."""

    index: Tensor
    norm: Tensor
    step_size: Tensor | None
    by: str
    """Where the norms come from, in words."""


@dataclass(frozen=True)
class Tenths:
    """Accuracy of a sample of each tenth, those with the smallest norms first."""

    clean: list[float]
    robust: list[float]
    interval: list[tuple[float, float]]
    count: int
    by: str


@functools.lru_cache(maxsize=1)
def norms_of(subject: Subject) -> Norms:
    """As the method remembered them, or at the images by the trained model."""
    return _remembered(subject) or _measured(subject)


def tenths_of(subject: Subject) -> Tenths:
    """Attack an even sample of each tenth with PGD-10."""
    norms = norms_of(subject)
    count = min(subject.pace.images(_PASSES, _SECONDS, _MOST), len(norms.index))
    order = norms.index[norms.norm.argsort(stable=True)]
    sample = order[evenly(len(order), count)]
    clean, robust = _verdicts(subject, sample)
    parts = min(_PARTS, len(sample))
    clean_parts, robust_parts = clean.tensor_split(parts), robust.tensor_split(parts)
    return Tenths(
        [float(part.float().mean()) for part in clean_parts],
        [float(part.float().mean()) for part in robust_parts],
        [wilson(int(part.sum()), len(part)) for part in robust_parts],
        len(sample),
        norms.by,
    )


def _remembered(subject: Subject) -> Norms | None:
    """What an adaptive method kept of every example it trained on."""
    if not subject.place.last.exists():
        return None
    try:
        tensors, _ = checkpoint.load(subject.place.last)
    except AtasError as error:
        raise NotAtHand(f"The checkpoint cannot be used: {error}") from error
    if "method.norms.average" not in tensors:
        return None
    training, examples = subject.recipe.training, len(subject.data.train)
    _, rest = split_probe(examples, training.probe, held_out=training.on_collapse != "warn")
    index = torch.arange(examples) if rest is None else rest
    average = tensors["method.norms.average"]
    if len(average) != len(index):
        raise NotAtHand("The training images at hand are not those of the run: give their folder with --data")
    return Norms(
        index, average.sqrt(), tensors["method.norms.step_size"], "norms as the method averaged them during training"
    )


def _measured(subject: Subject) -> Norms:
    """The gradient at the image itself, for as many images as a few seconds allow."""
    train = subject.data.train
    count = min(subject.pace.images(1, _SECONDS, 5 * _MOST), len(train))
    index = evenly(len(train), count)
    found = []
    with mode(subject.model, training=False), frozen(subject.model):
        for part in index.split(_BATCH):
            x, y = _batch(subject, part)
            found.append(l2_norm(input_gradient(subject.model, x, y)[0]).cpu())
    return Norms(index, torch.cat(found), None, "norms of the gradient at the images, by the trained model")


def _verdicts(subject: Subject, index: Tensor) -> tuple[Tensor, Tensor]:
    """Whether the model is right on these training images, and under PGD-10."""
    clean, robust = [], []
    model = subject.model
    for part in index.split(_BATCH):
        x, y = _batch(subject, part)
        point = attacks.pgd(model, x, y, subject.recipe.threat, steps=10)
        with torch.no_grad():
            clean.append(attacks.correct(model(x), y).cpu())
            robust.append(attacks.correct(model(point), y).cpu())
    return torch.cat(clean), torch.cat(robust)


def _batch(subject: Subject, index: Tensor) -> tuple[Tensor, Tensor]:
    train = subject.data.train
    return train.images[index].to(subject.device).float() / 255, train.labels[index].to(subject.device).long()
