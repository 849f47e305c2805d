"""What a training is put together from: a recipe, data and a model become an engine and a monitor."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atas import methods
from atas.data import Dataset
from atas.data._team import processors
from atas.data.loading import open_batches
from atas.data.resident import Batches
from atas.errors import UsageError
from atas.methods import Free, Method, Standard
from atas.parts import Part
from atas.processes import ALONE, Processes
from atas.training import recipe
from atas.training._checks import (
    check_alike,
    check_model,
    check_single,
    check_without_images,
    part_of,
    rows_of_steps,
    split_probe,
)
from atas.training.batchnorm import synchronise
from atas.training.engine import Engine, choose_device
from atas.training.gathering import share_weights
from atas.training.monitor import Monitor
from atas.training.views import as_tested, shown_size

Say = Callable[[str], None]


@dataclass(frozen=True)
class Assembly:
    """All that a training works with, in one process or in one of several, each with its part of the examples."""

    engine: Engine
    monitor: Monitor
    images: tuple[str, ...]  # the fingerprints of the images that it learns from


def assemble(
    settings: recipe.Recipe,
    data: Dataset,
    model: nn.Module,
    say: Say = print,
    rows: Tensor | None = None,
    peers: Processes = ALONE,
) -> Assembly:
    """Put a training together, with everything checked that can be before its first step.

    It learns from all training images or from those in `rows`; the monitor's are of all.
    """
    device = peers.device(choose_device(settings.engine.device))
    training = settings.training
    seen = as_tested(data, settings.data)
    check_model(model, seen)
    images = _fingerprints(data, rows)
    check_alike(settings, images, peers)
    probe, rest = split_probe(len(data.train), training.probe, held_out=training.on_collapse != "warn")
    if rows is not None:
        rest = rows if rest is None else rows[torch.isin(rows, rest)]
    examples = data.train if rest is None else data.train.part(rest)
    part = part_of(settings, len(examples), peers)
    rows_at_once = rows_of_steps(part, training.batch_size, peers)
    if 0 in rows_at_once:
        check_without_images(model, seen)
    if settings.engine.sync_batchnorm:
        rows_at_once = rows_of_steps(part, training.batch_size, ALONE)
    if 1 in rows_at_once:
        check_single(model, seen, shown_size(settings.data, 0, training.epochs))
    batches = open_batches(
        examples if part.whole else examples.part(part.numbers(torch.arange(len(part)))),
        settings.data.loading,
        batch_size=part.share(training.batch_size),
        pad=settings.data.pad,
        flip=settings.data.flip,
        seed=training.seed,
        device=device,
        workers=settings.data.workers or max(1, processors() // peers.here),
        say=say,
    )
    batches.own(part)
    method = _method(settings, part, seen.shape, device)
    if settings.engine.sync_batchnorm and not peers.alone:
        synchronise(model)
    share_weights(list(model.state_dict().values()), peers)
    engine = _engine(settings, model.to(device), method, batches, say, peers)
    watched = seen.train.images[probe].to(device), seen.train.labels[probe].to(device)
    attacked = not isinstance(method, Standard)
    monitor = Monitor(*watched, settings.threat, batch=engine.look_size, attacked=attacked, peers=peers)
    return Assembly(engine, monitor, images)


def _method(settings: recipe.Recipe, part: Part, shape: Sequence[int], device: torch.device) -> Method:
    """The recipe's method, with a memory for the examples of this part."""
    name, own = settings.method.name, dict(settings.method.settings)
    if methods.get(name) is Free:
        own["batch_size"] = part.share(own.get("batch_size", settings.training.batch_size))
    pad, seed = settings.data.pad, settings.training.seed
    method = methods.create(name, settings.threat, len(part), shape, pad=pad, device=device, seed=seed, **own)
    if not part.whole:
        method.own(part)
    return method


def _engine(
    settings: recipe.Recipe, model: nn.Module, method: Method, batches: Batches, say: Say, peers: Processes
) -> Engine:
    """The recipe's engine; for `auto` the captured one where a single process has a GPU."""
    kind, on_gpu = settings.engine.kind, batches.images.device.type == "cuda"
    if kind == "captured" and not on_gpu:
        raise UsageError("the captured engine needs a CUDA device; set engine.kind=eager or auto")
    if kind == "eager" or not on_gpu or (kind == "auto" and not peers.alone):
        return Engine(settings, model, method, batches, peers)
    from atas.training.captured import Captured

    return Captured(settings, model, method, batches, say, peers)


def _fingerprints(data: Dataset, rows: Tensor | None) -> tuple[str, ...]:
    """Of the images that a run learns from."""
    found = data.train.fingerprints()
    if rows is not None:
        found = tuple(hashlib.sha256(whole.encode() + rows.numpy().tobytes()).hexdigest() for whole in found)
    return tuple(whole[:16] for whole in found)
