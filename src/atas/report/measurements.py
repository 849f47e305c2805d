"""Measurements made for the page: confusion under PGD-10, the loss around an image, and accuracy by gradient norm."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atas import attacks
from atas.core.autograd import freeze, input_gradient, set_mode, to_float32
from atas.core.rng import CounterRNG
from atas.errors import AtasError
from atas.evaluation import wilson
from atas.report.run_view import RunView, Unavailable, evenly_spaced
from atas.threat import Threat, l2_norm
from atas.training import checkpoint
from atas.training.monitor import split_probe
from atas.training.probe import resolve_probe

_CONFUSION_SECONDS = 15.0
_CONFUSION_PASSES = 11
_BATCH = 250
POINTS = 21  # of the grid, along each direction
_LANDSCAPE_BATCH = 256
_DECILE_SECONDS = 10.0
_DECILE_PASSES = 12  # ten steps of PGD, the adversarial and the clean prediction
_DECILES = 10


@dataclass(frozen=True)
class ConfusionMatrix:
    """Counts of true class (row) and predicted class (column) under PGD-10."""

    counts: Tensor
    classes: tuple[str, ...]
    num_images: int

    def top_mistakes(self, count: int) -> list[tuple[str, str, int, int]]:
        """Return the most frequent mistakes: true class, predicted class, count, images of the true class."""
        wrong = self.counts.clone().fill_diagonal_(0)
        values, positions = wrong.flatten().topk(min(count, wrong.numel()))
        mistakes = []
        for value, position in zip(values.tolist(), positions.tolist(), strict=True):
            row, column = divmod(position, len(self.classes))
            if value:
                mistakes.append((self.classes[row], self.classes[column], value, int(self.counts[row].sum())))
        return mistakes


def confusion_matrix(view: RunView) -> ConfusionMatrix:
    """Attack test images with PGD-10, as many as fit into 15 seconds."""
    test, model, device = view.data.test, view.model, view.device
    count = min(
        view.throughput.max_images(_CONFUSION_PASSES, _CONFUSION_SECONDS, view.sample_sizes.confusion), len(test)
    )
    threat = view.evaluation.threat if view.evaluation is not None else view.recipe.threat
    classes = len(test.classes)
    counts = torch.zeros(classes, classes, dtype=torch.int64)
    for index in evenly_spaced(len(test), count).split(_BATCH):
        x, y = test.images[index].to(device).float() / 255, test.labels[index].to(device).long()
        adversarial = attacks.pgd(model, x, y, threat, steps=10, index=index.to(device))
        with torch.no_grad():
            predicted = model(adversarial)[:, :classes].argmax(1)
        counts += (y * classes + predicted).bincount(minlength=classes * classes).view(classes, classes).cpu()
    return ConfusionMatrix(counts, test.classes, count)


@dataclass(frozen=True)
class LossLandscape:
    """Loss on a grid: rows along a random direction, columns along the adversarial one, from -1 to 1 budgets."""

    steps: list[float]
    loss: Tensor

    @property
    def peaks_inside(self) -> bool:
        """Whether the loss along the adversarial direction is highest well inside the ball, not at its edge."""
        along = self.loss[len(self.steps) // 2, len(self.steps) // 2 :]
        return bool(along[:-2].max() > along[-1] + 0.1 * (along.max() - along[0]))


def loss_landscape(model: nn.Module, x: Tensor, y: Tensor, threat: Threat, *, index: int) -> LossLandscape:
    """Return the loss around one image (1, C, H, W), in eval mode.

    One direction is a full FGSM step, the other a random step of the same length, drawn by the image's index. Pixels
    stay in [0, 1].
    """
    steps = torch.linspace(-1, 1, POINTS, device=x.device)
    with set_mode(model, training=False), freeze(model):
        gradient, _ = input_gradient(model, x, y)
        number = torch.zeros((), dtype=torch.int64, device=x.device)
        draw = CounterRNG(0, number, torch.tensor([index], device=x.device))
        noise = threat.sample(draw, x.shape[1:], reset=False)
        zero = torch.zeros_like(x)
        along, aside = (threat.step(zero, way.to(x.dtype), threat.eps) for way in (gradient.nan_to_num(), noise))
        grid = x + steps.view(-1, 1, 1, 1, 1) * aside + steps.view(1, -1, 1, 1, 1) * along
        points = grid.reshape(-1, *x.shape[1:]).clamp(0, 1)
        with torch.no_grad():
            losses = [
                F.cross_entropy(to_float32(model(part)), y.expand(len(part)), reduction="none")
                for part in points.split(_LANDSCAPE_BATCH)
            ]
    return LossLandscape(
        [round(step, 6) for step in steps.tolist()],
        torch.cat(losses).nan_to_num(0.0, 0.0, 0.0).view(POINTS, POINTS).double().cpu(),
    )


@dataclass(frozen=True)
class ExampleNorms:
    """Gradient norms of training examples (indices into the training set), and step sizes of adaptive methods."""

    index: Tensor
    norm: Tensor
    step_size: Tensor | None
    source: str
    """Where the norms come from, for readers."""


@dataclass(frozen=True)
class NormDeciles:
    """Accuracy of a sample of each decile of the gradient norm, smallest norms first."""

    clean: list[float]
    robust: list[float]
    interval: list[tuple[float, float]]
    count: int
    source: str


_norms: weakref.WeakKeyDictionary[RunView, ExampleNorms] = weakref.WeakKeyDictionary()  # model and data may go


def gradient_norms(view: RunView) -> ExampleNorms:
    """Return the norms that the method stored, or measure them with the trained model."""
    if view not in _norms:
        _norms[view] = _from_checkpoint(view) or _from_model(view)
    return _norms[view]


def accuracy_by_norm_decile(view: RunView) -> NormDeciles:
    """Attack an even sample of each decile with PGD-10."""
    norms = gradient_norms(view)
    count = min(
        view.throughput.max_images(_DECILE_PASSES, _DECILE_SECONDS, view.sample_sizes.norm_deciles), len(norms.index)
    )
    order = norms.index[norms.norm.argsort(stable=True)]
    sample = order[evenly_spaced(len(order), count)]
    clean, robust = _clean_and_robust(view, sample)
    parts = min(_DECILES, len(sample))
    clean_parts, robust_parts = clean.tensor_split(parts), robust.tensor_split(parts)
    return NormDeciles(
        [float(part.float().mean()) for part in clean_parts],
        [float(part.float().mean()) for part in robust_parts],
        [wilson(int(part.sum()), len(part)) for part in robust_parts],
        len(sample),
        norms.source,
    )


def _from_checkpoint(view: RunView) -> ExampleNorms | None:
    """Read the norms that an adaptive method stores in the checkpoint; None for other methods."""
    if not view.folder.last_checkpoint.exists():
        return None
    try:
        tensors, _ = checkpoint.load(view.folder.last_checkpoint)
    except AtasError as error:
        raise Unavailable(f"Cannot read the checkpoint: {error}") from error
    if "method.norms.average" not in tensors:
        return None
    examples = len(view.data.train)
    training = resolve_probe(view.recipe, examples).training
    assert training.probe != "auto"
    _, rest = split_probe(examples, training.probe, held_out=training.on_collapse != "warn")
    index = torch.arange(examples) if rest is None else rest
    average = tensors["method.norms.average"]
    if len(average) != len(index):
        raise Unavailable("The training images are not those of the run: pass their folder with --data")
    return ExampleNorms(
        index, average.sqrt(), tensors["method.norms.step_size"], "norms as the method averaged them during training"
    )


def _from_model(view: RunView) -> ExampleNorms:
    """Measure the gradient at training images, as many as fit into 10 seconds."""
    train = view.data.train
    count = min(view.throughput.max_images(1, _DECILE_SECONDS, 5 * view.sample_sizes.norm_deciles), len(train))
    index = evenly_spaced(len(train), count)
    norms = []
    with set_mode(view.model, training=False), freeze(view.model):
        for part in index.split(_BATCH):
            x, y = _batch(view, part)
            norms.append(l2_norm(input_gradient(view.model, x, y)[0]).cpu())
    return ExampleNorms(index, torch.cat(norms), None, "norms of the gradient at the images, by the trained model")


def _clean_and_robust(view: RunView, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return whether the model is correct on these training images, without an attack and under PGD-10."""
    clean, robust = [], []
    model = view.model
    for part in index.split(_BATCH):
        x, y = _batch(view, part)
        adversarial = attacks.pgd(model, x, y, view.recipe.threat, steps=10)
        with torch.no_grad():
            clean.append(attacks.correct(model(x), y).cpu())
            robust.append(attacks.correct(model(adversarial), y).cpu())
    return torch.cat(clean), torch.cat(robust)


def _batch(view: RunView, index: Tensor) -> tuple[Tensor, Tensor]:
    train = view.data.train
    return train.images[index].to(view.device).float() / 255, train.labels[index].to(view.device).long()
