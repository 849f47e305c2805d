"""What is looked at before a training begins."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from atas.checks import CANNOT_TAKE, checked_logits, trying
from atas.data import Dataset
from atas.errors import DataError, UsageError
from atas.noise import Purpose, seed_for
from atas.parts import Part
from atas.passes import full, mode
from atas.processes import Processes
from atas.training import recipe

_NO_ROWS = (
    "the model cannot take a batch without images, as some process gets at the end of an epoch ({why}); use "
    "x.flatten(1) rather than x.view(len(x), -1), or other data.shards or training.batch_size"
)

_ONE_ROW = (
    "the model cannot learn from a single image, as some process gets in a batch ({why}); use another "
    "training.batch_size, whose remainder at the end of an epoch is not one image, or other data.shards"
)


def part_of(settings: recipe.Recipe, examples: int, peers: Processes) -> Part:
    """The part of a training set that this process takes."""
    shards = settings.data.shards or 1
    if shards < peers.count:
        raise UsageError(
            f"data.shards = {shards} gives work to {shards} of {peers.count} processes; begin the run with --set "
            f"data.shards={peers.count}, or a multiple, or start fewer processes"
        )
    if examples < shards:
        raise UsageError(f"{examples} training images do not fill {shards} shards; set a smaller data.shards")
    return Part.of(examples, shards, peers.rank, peers.count)


def check_alike(settings: recipe.Recipe, data: tuple[str, ...], peers: Processes) -> None:
    """Refuse a process that would train something else than the first."""
    mine = recipe.fingerprint(settings)
    first, images = peers.by_first(lambda: (mine, data))
    if first != mine or not set(images) & set(data):
        raise DataError(
            f"process {peers.rank} of {peers.count} has another recipe or other training images than the first; give "
            f"the same command and the same data on every machine"
        )


def rows_of_steps(part: Part, batch_size: int, peers: Processes) -> set[int]:
    """How many images some process has in a full batch, or in the short last one of an epoch."""
    last = part.examples % batch_size or batch_size
    counts = {last} if part.examples < batch_size else {last, batch_size}
    parts = [Part.of(part.examples, part.shards, rank, peers.count) for rank in range(peers.count)]
    return {part.share(count) for part in parts for count in counts}


def check_single(model: nn.Module, data: Dataset, size: int | None) -> None:
    """Try the model on one image of this side as in training, where BatchNorm has no variance of a single value."""
    with trying(_ONE_ROW):
        _as_in_training(model, _as_seen(model, data, 1)[..., :size, :size])


def check_model(model: nn.Module, data: Dataset) -> None:
    """Try the model on two images, there and back, before anything is trained or given up."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError("the model has no weights to train; set requires_grad on some")
    x, y = _as_seen(model, data, 2), data.train.labels[:2].long()
    with trying(_cannot_take(model, data)), mode(model, training=False), torch.enable_grad():
        logits = checked_logits(model(x.requires_grad_(True)), len(x))
        if logits.shape[1] < data.num_classes:
            raise UsageError(f"the model has {logits.shape[1]} outputs for {data.num_classes} classes; give it more")
        if not bool(logits.isfinite().all()):
            raise UsageError(
                "the model's outputs are NaN or infinite before any training; look at its weights and at divisions, "
                "logarithms and roots in its forward()"
            )
        _check_gradients(model, x, F.cross_entropy(full(logits), y.to(logits.device)))
        if len(x) > 1 and not isinstance(model, torch.jit.ScriptModule):  # which buffers cannot be lent to
            checked_logits(_as_in_training(model, x.detach()), len(x))


def _check_gradients(model: nn.Module, x: Tensor, loss: Tensor) -> None:
    """A gradient reaches the images and some of the weights; it is left in none of them."""
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(loss, [x, *weights], allow_unused=True) if loss.requires_grad else (None,)
    lost = "images" if found[0] is None else "weights" if all(gradient is None for gradient in found[1:]) else None
    if lost is not None:
        raise UsageError(
            f"no gradient of the loss reaches the {lost} through the model; look for detach(), no_grad(), argmax or "
            f"rounding in its forward()"
        )


def check_without_images(model: nn.Module, data: Dataset) -> None:
    """Try the model on a batch without images."""
    with trying(_NO_ROWS), mode(model, training=False), torch.no_grad():
        checked_logits(model(_as_seen(model, data, 0)), 0)


def _as_in_training(model: nn.Module, x: Tensor) -> object:
    """What the model gives in train mode; running statistics and random states stay as they were."""
    lent = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with mode(model, training=True), torch.no_grad(), torch.random.fork_rng(devices=[]):
        return functional_call(model, lent, (x,))


def _as_seen(model: nn.Module, data: Dataset, images: int) -> Tensor:
    """The first training images, where the model is."""
    return data.train.images[:2][:images].to(next(model.parameters()).device).float() / 255


def _cannot_take(model: nn.Module, data: Dataset) -> str:
    """The sentence for a model that raises, with the remedy where its precision may be the cause."""
    sentence = CANNOT_TAKE.format(shape=tuple(data.shape))
    others = {parameter.dtype for parameter in model.parameters()} - {torch.float32}
    if not others:
        return sentence
    return f"{sentence}; its weights are {min(map(str, others))}: give model.float()"


def split_probe(examples: int, probe: int, *, held_out: bool) -> tuple[Tensor, Tensor | None]:
    """Which training images the monitor attacks, the same in every run, and which are left to train on (None: all)."""
    generator = torch.Generator().manual_seed(seed_for(0, 0, Purpose.PROBE))
    order = torch.randperm(examples, generator=generator)
    if not held_out:
        return order[:probe].sort().values, None
    if probe >= examples:
        raise DataError(
            f"training.probe = {probe} images would be held out of {examples} in all; set a smaller training.probe"
        )
    return order[:probe].sort().values, order[probe:].sort().values
