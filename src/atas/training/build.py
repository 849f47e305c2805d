"""Build a training: a recipe, data and a model become a method, a loader, an engine and a monitor.

All checks that need no training step are made here. Each rank gets its shard of the examples.
"""

from __future__ import annotations

import dataclasses
import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Unpack, cast

import torch
from torch import Tensor, nn

from atas import methods, models
from atas._utils.formatting import format_bytes
from atas._utils.imports import GIVEN
from atas._utils.system import available_cpus, host_memory
from atas.core.model_state import state_tensors
from atas.core.validation import check_module, check_rows
from atas.data import Dataset
from atas.data.dataset import Split
from atas.data.lazy_images import LazyImages
from atas.data.loader import DeviceLoader, Loader, LoaderOptions
from atas.data.streaming import StreamingLoader
from atas.distributed.batchnorm import convert_sync_batchnorm
from atas.distributed.sharding import DataShard
from atas.distributed.state import broadcast_weights
from atas.distributed.world import SINGLE, World, select_device
from atas.errors import DataError, SettingsWarning, UsageError
from atas.methods import EMATeacher, LabelTargets, Method, RememberedPredictions
from atas.methods.consistency import Consistency
from atas.methods.targets import Noise
from atas.models.weights import per_channel
from atas.recipes import Recipe, TargetsConfig, recipe_fingerprint
from atas.recipes.checks import unreached_epochs
from atas.training.data import eval_view, train_resolution
from atas.training.engine import Engine
from atas.training.model_checks import (
    check_empty_batch,
    check_model,
    check_single_image,
    check_small_views,
    check_step,
)
from atas.training.monitor import Monitor, split_probe
from atas.training.monitor_budget import resolve_probe

# The share of a device's memory that images may take; a method's perturbations may take the same again.
RESIDENT_MEMORY_SHARE = 0.4

Log = Callable[[str], None]


@dataclass(frozen=True)
class TrainingParts:
    """The parts of a training on one rank."""

    engine: Engine
    monitor: Monitor
    data_fingerprints: tuple[str, ...]  # they identify the training images


def build(
    recipe: Recipe,
    data: Dataset,
    model: nn.Module,
    log: Log = print,
    rows: Tensor | None = None,
    world: World = SINGLE,
) -> TrainingParts:
    """Build the parts of a training, and check them.

    The model is trained on all training images or on those in `rows`; the monitor's images are chosen from all.
    """
    device = select_device(recipe.engine.device, world)
    training = (recipe := resolve_probe(recipe, len(data.train))).training
    eval_data = eval_view(data, recipe.data)
    check_module(model, trains=True, bare=True)
    outputs = check_model(model, eval_data)
    first_size = train_resolution(recipe.data, 0, training.epochs)
    if first_size is not None and recipe.data.view_start is not None:
        check_small_views(model, eval_data, first_size)
    if rows is not None:
        check_rows(rows, len(data.train))
    fingerprints = _data_fingerprints(data, rows)
    check_same_run(recipe, fingerprints, world)
    probe, rest = split_rows(recipe, len(data.train), rows)
    examples = data.train if rest is None else data.train.part(rest)
    shard = data_shard(recipe, len(examples), world)
    sizes = batch_sizes(shard, training.batch_size, world)
    if 0 in sizes:
        check_empty_batch(model, eval_data)
    if recipe.engine.sync_batchnorm:
        sizes = batch_sizes(shard, training.batch_size, SINGLE)
    if 1 in sizes:
        check_single_image(model, eval_data, first_size)
    loader = open_loader(
        examples if shard.is_whole else examples.part(shard.global_index(torch.arange(len(shard)))),
        recipe.data.loading,
        batch_size=shard.local_count(training.batch_size),
        pad=recipe.data.frame_pad,
        flip=recipe.data.flip,
        seed=training.seed,
        device=device,
        workers=recipe.data.workers or max(1, available_cpus() // world.local_size),
        log=log,
    )
    loader.set_shard(shard)
    method = build_method(recipe, shard, eval_data.shape, outputs, device)
    for sentence in (method.settings_warning, *unreached_epochs(recipe)):
        if sentence is not None:
            log(sentence)
    method.check_module(model)
    if recipe.engine.sync_batchnorm and world.size > 1:
        convert_sync_batchnorm(model)
    broadcast_weights(list(state_tensors(model).values()), world)
    engine = _build_engine(recipe, model.to(device), method, loader, log, world)
    check_step(engine, build_method(recipe, DataShard(2), eval_data.shape, outputs, device), eval_data)
    probed = eval_data.train.images[probe].to(device), eval_data.train.labels[probe].to(device)
    monitor = Monitor(
        *probed,
        recipe.threat,
        batch_size=engine.eval_batch_size,
        adversarial=method.adversarial,
        every=training.probe_every or 1,
        world=world,
    )
    return TrainingParts(engine, monitor, fingerprints)


def split_rows(recipe: Recipe, examples: int, rows: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the training images that the monitor attacks, and those to train on (None: all)."""
    training = recipe.training
    assert training.probe != "auto"
    probe, rest = split_probe(examples, training.probe, held_out=training.on_collapse != "warn")
    if rows is not None:
        rest = rows if rest is None else rows[torch.isin(rows, rest)]
    return probe, rest


def build_targets(config: TargetsConfig, outputs: int) -> LabelTargets | None:
    """Return the simplest targets with these settings; None for the labels themselves."""
    smoothing, noise = config.smoothing, cast(Noise, config.noise)
    if config.teacher_share is not None:
        return EMATeacher(
            share=config.teacher_share, temperature=config.teacher_temperature, smoothing=smoothing, noise=noise
        )
    if config.share:
        return RememberedPredictions(
            outputs,
            share=config.share,
            decay=config.decay,
            from_epoch=config.from_epoch,
            smoothing=smoothing,
            noise=noise,
        )
    return LabelTargets(smoothing=smoothing, noise=noise) if smoothing else None


def build_method(recipe: Recipe, shard: DataShard, shape: Sequence[int], outputs: int, device: torch.device) -> Method:
    """Create the recipe's method for a model with this number of outputs, with rows for the examples of this shard."""
    name, hyperparameters = recipe.method.name, dict(recipe.method.settings)
    if (targets := build_targets(recipe.targets, outputs)) is not None:
        hyperparameters["targets"] = targets
    if methods.takes_classes(name, trusted=recipe.trusted):
        hyperparameters["classes"] = outputs
    if recipe.consistency.weight:
        hyperparameters["consistency"] = Consistency(**dataclasses.asdict(recipe.consistency))
    if "batch_size" in methods.settings(name, trusted=recipe.trusted):
        hyperparameters["batch_size"] = shard.local_count(hyperparameters.get("batch_size", recipe.training.batch_size))
    hyperparameters |= {"pad": recipe.data.frame_pad, "device": device, "seed": recipe.training.seed}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SettingsWarning)  # `build` logs it once
        method = methods.create(name, recipe.threat, len(shard), shape, trusted=recipe.trusted, **hyperparameters)
    state_tensors(method)  # before anything begins: a method of the user's own may hold what no checkpoint can
    if not shard.is_whole:
        method.set_shard(shard)
    method.weight_perturbation = recipe.optimizer.weight_perturbation
    return method


def _build_engine(recipe: Recipe, model: nn.Module, method: Method, loader: Loader, log: Log, world: World) -> Engine:
    """Create the recipe's engine; `auto` is CUDA graphs on a GPU if they can record the communication, else eager."""
    kind, on_gpu = recipe.engine.kind, loader.images.device.type == "cuda"
    if kind == "captured" and not on_gpu:
        raise UsageError("the captured engine needs a CUDA device; set engine.kind=eager or auto")
    if kind == "eager" or not on_gpu:
        return Engine(recipe, model, method, loader, world)
    if not world.can_capture:
        reason = "the processes communicate without NCCL, which CUDA graphs need"
        if kind == "captured":
            raise UsageError(f"{reason}: use NCCL between GPUs, or set engine.kind=eager")
        log(f"{reason}: steps run eagerly, which takes several times as long for small networks")
        return Engine(recipe, model, method, loader, world)
    from atas.training.cuda_graph_engine import CudaGraphEngine

    return CudaGraphEngine(recipe, model, method, loader, log, world)


def _data_fingerprints(data: Dataset, rows: Tensor | None) -> tuple[str, ...]:
    """Return the fingerprints of the images that a run is trained on."""
    fingerprints = data.train.fingerprints()
    if rows is not None:
        fingerprints = tuple(
            hashlib.sha256(whole.encode() + rows.numpy().tobytes()).hexdigest() for whole in fingerprints
        )
    return tuple(whole[:16] for whole in fingerprints)


def open_loader(
    split: Split,
    loading: str,
    *,
    device: torch.device,
    workers: int | None = None,
    log: Callable[[str], object] = print,
    **how: Unpack[LoaderOptions],
) -> Loader:
    """Open the loader of a training set: `resident`, `streaming`, or for `auto` resident if the images fit the device.

    The choice is logged if images are streamed, or read from files into the device's memory.
    """
    images, labels = split.images, split.labels
    size, memory = images.shape.numel(), _device_memory(device)
    location = images.location if isinstance(images, LazyImages) else "memory"
    resident = loading == "resident" or (loading == "auto" and size <= RESIDENT_MEMORY_SHARE * memory)
    summary = f"{len(labels):,} training images, {format_bytes(size)} as pixels,"
    if not resident:
        loader = StreamingLoader(images, labels, device=device, workers=workers, **how)
        why = "" if loading == "streaming" else f", as {device.type} has {memory / 1e9:.0f} GB (data.loading = auto)"
        processes = "1 process" if loader.workers == 1 else f"{loader.workers} processes"
        log(f"{summary} are streamed from {location} by {processes}{why}")
        return loader
    if isinstance(images, LazyImages):
        log(f"{summary} are read from {location} into the memory of {device.type}")
    return DeviceLoader(images, labels, device=device, **how)


def _device_memory(device: torch.device) -> int:
    """Return the total memory of a device in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return host_memory()


def data_shard(recipe: Recipe, examples: int, world: World) -> DataShard:
    """Return this rank's shard of a training set."""
    shards = recipe.data.shards or 1
    if shards < world.size:
        raise UsageError(
            f"data.shards = {shards} gives work to {shards} of {world.size} processes; start fewer processes, or a new "
            f"run with --set data.shards={world.size} or a multiple"
        )
    if examples < shards:
        raise UsageError(f"{examples} training images do not fill {shards} shards; set a smaller data.shards")
    return DataShard.for_rank(examples, shards, world.rank, world.size)


def check_same_run(recipe: Recipe, data: tuple[str, ...], world: World) -> None:
    """Raise DataError if this rank has another recipe or other data than rank 0."""
    local = recipe_fingerprint(recipe)
    first, images = world.on_rank0(lambda: (local, data))
    if first != local or not set(images) & set(data):
        raise DataError(
            f"process {world.rank} of {world.size} has another recipe or other training images than process 0; "
            f"use the same command and the same data on every machine"
        )


def batch_sizes(shard: DataShard, batch_size: int, world: World) -> set[int]:
    """Return the numbers of images that a rank may have in a full batch or in the last, shorter one."""
    last = shard.examples % batch_size or batch_size
    counts = {last} if shard.examples < batch_size else {last, batch_size}
    ranks = [DataShard.for_rank(shard.examples, shard.shards, rank, world.size) for rank in range(world.size)]
    return {shard.local_count(count) for shard in ranks for count in counts}


def build_model(recipe: Recipe, data: Dataset, *, pretrained: bool = False) -> nn.Module:
    """Create the model of a recipe, with weights drawn by the recipe's seed; the caller's random state stays.

    With `pretrained`, a network of timm gets the weights that timm offers if the recipe asks for them.
    """
    if recipe.model.name.startswith(GIVEN):
        raise UsageError(
            f"the model of this recipe was given in Python ({recipe.model.name}); pass it to atas.train(model=...)"
        )
    if data.num_classes == 1:
        raise DataError(f"the data has a single class, {data.train.classes[0]}; a classifier needs two or more")
    mean, std = per_channel(recipe.model.mean), per_channel(recipe.model.std)
    _check_channels(recipe, data.shape[0])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.training.seed)
        return models.create(
            recipe.model.name,
            data.num_classes,
            data.shape[0],
            mean,
            std,
            size=eval_view(data, recipe.data).shape[1:],
            options=recipe.model.settings,
            pretrained=pretrained and bool(recipe.model.pretrained),
            trusted=recipe.trusted,
        )


def _check_channels(recipe: Recipe, channels: int) -> None:
    """Raise DataError if the weights that a training starts from or their normalisation are for other images."""
    for constants in (recipe.model.mean, recipe.model.std):
        if recipe.model.weights is not None and constants is not None and len(constants) not in (1, channels):
            raise DataError(
                f"the weights of {recipe.model.weights} (or model.mean and model.std) are for images of "
                f"{len(constants)} channels, and those of the data have {channels}; choose other weights"
            )
