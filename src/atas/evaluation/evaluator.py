"""`evaluate`: measure accuracy under attack, from its arguments to the result.

With several processes, each evaluates a share of the examples.
"""

from __future__ import annotations

import inspect
import itertools
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from atas import __version__
from atas import attacks as library
from atas._utils.environment import environment_info
from atas.attacks import Attack, Clean, StagedAttack
from atas.attacks.base import choose_threat
from atas.attacks.registry import is_autoattack
from atas.attacks.scheduler import default_batch_size
from atas.core.arguments import check_arguments, check_count, check_interface, check_seed, describe
from atas.core.fingerprint import LOGITS_KEY, logits_fingerprint, weights_hash
from atas.core.validation import check_module
from atas.distributed.world import SINGLE, World, init
from atas.errors import UsageError
from atas.evaluation.adversarial import PointStore, saved_points
from atas.evaluation.backend import device_context, hookable, model_dtype, prepare, resolve_device
from atas.evaluation.corruptions import Corruption, resolve
from atas.evaluation.details import EvaluationDetails
from atas.evaluation.diagnostics import SAMPLE_SIZE, Diagnostics
from atas.evaluation.examples import RECORDED_EXAMPLES, ExampleRecorder, collect_details
from atas.evaluation.inputs import (
    CHUNK_BYTES,
    ChunkReader,
    InputSource,
    MapDataset,
    Sample,
    SelectedSource,
    class_names,
    describe_mask,
    open_source,
    select_targets,
)
from atas.evaluation.outcomes import merge_shards, reported_stages, summarize
from atas.evaluation.progress import ProgressMeter, StatusCallback
from atas.evaluation.result import WORST, Evaluation
from atas.evaluation.result_format import MAX_LABELS
from atas.evaluation.resume import SAVE_INTERVAL, ProgressFile
from atas.evaluation.runner import AttackRunner, EvaluationSetup, total_max_queries
from atas.evaluation.warnings import EvaluationWarning, check_chance
from atas.threat import Threat

_FINGERPRINT_IMAGES = 4  # images whose logits identify a model
_ASSUMED_CLASSES = 10  # for an estimate of the work before the model has run
_lock = threading.RLock()
_VERDICT = (
    "prediction at the point that the attack returned (PGD: last iterate, worst over restarts; searches: any point "
    "inside the ball, confirmed by the model in full precision)"
)
_TARGETED_VERDICT = f"correct unless the target class is predicted; {_VERDICT}"


@check_arguments
def evaluate(
    model: nn.Module,
    images: Tensor | np.ndarray | MapDataset,
    labels: Tensor | np.ndarray | None = None,
    threat: Threat | None = None,
    *,
    attacks: Iterable[str | Attack] = ("pgd10", "pgd50"),
    batch_size: int | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    step_size: float | None = None,
    precision: str = "auto",
    progress: StatusCallback | None = None,
    progress_file: str | os.PathLike[str] | None = None,
    progress_interval: float = SAVE_INTERVAL,
    chunk_bytes: int = CHUNK_BYTES,
    shard: bool = False,
    targets: Tensor | np.ndarray | int | None = None,
    keep: bool = False,
    corruptions: Iterable[str] = (),
    details: bool = True,
) -> Evaluation:
    """Measure a model's accuracy on clean images and under attacks, each on all examples.

    An example is correct under an attack if the model predicts the label at the point that the attack returned.
    Verdicts are given in eval mode and in float32 without TF32 or autocast (in float64 if the weights are float64); the
    model's mode and the settings of PyTorch are restored at the end. Verdicts depend neither on the batch size nor on
    the other attacks.

    The `warnings` of the result list reasons not to trust it: models that give different outputs for the same image, do
    not return logits, or have gradients that mislead attacks.

    Args:
        model: maps images (N, C, H, W) in [0, 1] to logits (N, classes). It is never moved to another device.
        images: float in [0, 1] or uint8, NCHW, as a tensor or an array; or, without labels, a dataset of
            (image, label) pairs, or an object with tensors `images` and `labels`, such as `atas.data.load(...).test`.
        labels: integers (N,).
        threat: the threat model, such as `atas.Linf(8/255)`, or `atas.Linf(8/255).masked(mask)` if only some pixels may
            change.
        attacks: names as in `atas.attacks.names()`, or your own attacks. `clean` is always included. A string is split
            at commas, as on the command line: "pgd10,autoattack".
        batch_size: number of images at a time; by default 1024 on CUDA and 256 elsewhere.
        device: the device of the batches; by default the model's device.
        seed: another seed gives other random starts.
        step_size: step size of every PGD, in pixel units; by default eps/5.
        precision: precision of the search for adversarial inputs: `auto` for the fastest on the device, or `float32`.
            An adversarial input counts only if it fools the model in float32.
        progress: called with a `Status` at each poll of a search: the running attack and the maximum time left.
        progress_file: file for the progress. After a stop, the same call resumes from it, with the same verdicts. The
            file stays until the result is saved: `Evaluation.save` removes it.
        progress_interval: seconds between two writes of the progress file.
        chunk_bytes: memory for the images that are read at a time. Searches need about twice as much in addition.
        shard: share the examples among the processes of torch.distributed. All processes must call `evaluate` with the
            same arguments, and all get the whole result.
        targets: the class to push the images towards, or one class per image (N,). An image then counts as correct
            unless the model predicts its target, so `accuracy` is the fraction of images that were not pushed there.
            Images of the one target class are left out.
        keep: keep the perturbed images of every attack in `result.adversarial`: the adversarial input, or the point
            with the smallest margin where the attack failed. They take the memory of the images once per attack.
        corruptions: names of common corruptions, as in `atas.evaluation.corruptions.names()`, or "all". Accuracy at
            each severity is in `result.corruptions`; it is no part of `worst`.
        details: collect predictions, a few examples and loss landscapes in `result.details`; not with targets or masks.

    >>> from atas import Linf
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4))
    >>> x, y = torch.rand(50, 1, 4, 4), torch.randint(4, (50,))
    >>> result = evaluate(model, x, y, Linf(8/255), attacks=("fgsm", "pgd10"))
    >>> list(result.accuracy), result.accuracy["worst"] <= result.accuracy["pgd10"]
    (['clean', 'fgsm', 'pgd10', 'worst'], True)
    """
    check_module(model)
    check_seed(seed)
    model = hookable(model)
    if not isinstance(threat, Threat):
        problem = "is missing" if threat is None else f"cannot be {threat!r}"
        raise UsageError(f"the threat model {problem}; pass it after the labels, such as threat=atas.Linf(8/255)")
    resolved = _resolve_attacks(attacks, step_size, threat)
    corrupting = _resolve_corruptions(corruptions, resolved, targets)
    settings = {name: attack.settings(threat) for name, attack in resolved.items()}
    opened = open_source(images, labels)
    source: InputSource = opened
    target_classes, target_info = None, None
    if targets is not None:
        source, target_classes, target_info = select_targets(opened, targets)
        _check_takes_targets(resolved)
        threat = threat.select(source.rows) if isinstance(source, SelectedSource) else threat
    target_device, dtype = resolve_device(model, source.device, device), model_dtype(model)
    slots = default_batch_size(target_device) if batch_size is None else check_count("batch_size", batch_size)

    meter = ProgressMeter(progress)
    with _alone(meter), torch.inference_mode(False), device_context(target_device), _world(shard) as world:
        reader = ChunkReader(source, dtype, chunk_bytes)
        threat.check_budget(reader.shape)
        threat.check_images((len(reader), *reader.shape))
        for corruption in corrupting.values():
            corruption.check_shape(reader.shape)
        mask = describe_mask(threat)
        weights, (data, all_labels) = weights_hash(model), world.on_rank0(reader.digest_and_labels)
        sample = reader.sample(SAMPLE_SIZE)
        queries = len(reader) // world.size * total_max_queries((resolved | corrupting).values(), _ASSUMED_CLASSES)
        with prepare(
            model, target_device, precision=precision, slots=slots, images=sample.x, queries=queries, log=meter.notify
        ) as scheduler:
            identity = {
                "weights": weights,
                "data": data,
                "examples": len(reader),
                "threat": [threat.name, threat.eps],
                "attacks": settings,
                "seed": seed,
                "precision": [str(dtype), scheduler.precision],
                "processes": [world.rank, world.size],
                "targets": target_info,
                "mask": mask,
                "corruptions": list(corrupting) or None,
                "atas": __version__,
                LOGITS_KEY: logits_fingerprint(
                    scheduler.verifier, sample.x[: min(slots, _FINGERPRINT_IMAGES)].to(target_device)
                ),
            }
            path = _progress_path(progress_file, world)
            file = ProgressFile(path, identity, meter.notify, interval=progress_interval)
            store = PointStore(path, file.fingerprint, meter.notify) if keep else None
            setup = EvaluationSetup(
                model, scheduler, resolved, corrupting, threat, seed, reader, all_labels, target_classes
            )
            names = class_names(images, all_labels) if details and target_info is None and mask is None else None
            verdicts, warnings, seconds, found = _run(setup, sample, names, world, file, meter, store)
            owned = [*(store.paths if store else ()), *_owned(file)]
            progress_files = list(itertools.chain(*world.all_gather(owned)))

    return Evaluation(
        threat=threat.unmasked,
        **verdicts,
        warnings=tuple(warnings),
        protocol={
            "attacks": settings,
            "verdict": _VERDICT if target_info is None else _TARGETED_VERDICT,
            **{name: value for name, value in (("targets", target_info), ("mask", mask)) if value is not None},
            "seed": seed,
            "precision": str(dtype).removeprefix("torch."),
            "search_precision": scheduler.precision,
            **({"search_notes": list(scheduler.notes)} if scheduler.notes else {}),
            "tf32": False,
            "mode": "eval",
            "image_shape": list(reader.shape),
            "batch_size": slots,
            "processes": world.size,
            "checks_seconds": seconds,
        },
        environment=environment_info(target_device),
        weights=weights,
        data=data,
        progress_files=tuple(dict.fromkeys(progress_files)),
        details=found,
        labels=all_labels if keep else None,
    )


def _run(
    setup: EvaluationSetup,
    sample: Sample,
    names: tuple[str, ...] | None,
    world: World,
    progress_file: ProgressFile,
    meter: ProgressMeter,
    store: PointStore | None,
) -> tuple[dict[str, Any], list[EvaluationWarning], float, EvaluationDetails | None]:
    """Return what `summarize` returns, the warnings, the seconds that the diagnostics took, and details.

    `names` are those of the classes; None if details are not asked for.
    """
    reader, targeted = setup.reader, setup.targets is not None
    began = time.perf_counter()
    diagnostics = Diagnostics(setup, sample)
    warnings = diagnostics.check_model() if world.is_main else []
    seconds = time.perf_counter() - began
    at_chance = diagnostics.check_clean() if world.is_main and not targeted else []
    for warning in [*warnings, *at_chance]:  # before hours of attacks
        meter.warn(warning)

    rows = world.rows(len(reader))
    recorder = ExampleRecorder(reader.spread(RECORDED_EXAMPLES) if names is not None else range(0))
    runner = AttackRunner(
        setup, reader.chunks(rows), diagnostics.num_classes, progress_file, meter, recorder.record, store
    )
    outcomes = merge_shards(world.all_gather((rows, runner.run())), len(reader))
    verdicts = summarize(setup.attacks, setup.corruptions, outcomes)
    for found in world.all_gather(recorder.found):
        recorder.found.update(found)

    with runner.saved_on_error():
        began = time.perf_counter()
        if world.is_main:
            num_correct = int(verdicts["correct"][Clean.name].sum())
            counts = setup.labels.unique(return_counts=True)[1].tolist()
            chance = None if targeted else check_chance(num_correct, counts)
            warnings += [] if chance is None else [chance]
            warnings += diagnostics.check_attacks({name: outcomes[name].code for name in setup.attacks})
        seconds += time.perf_counter() - began
        details = None
        if names is not None:
            broken_by = verdicts["broken_by"][WORST]
            details = world.on_rank0(lambda: collect_details(setup, names, outcomes, broken_by, recorder))
    return verdicts, world.on_rank0(lambda: warnings), seconds, details


def _resolve_attacks(attacks: Iterable[str | Attack], step_size: float | None, threat: Threat) -> dict[str, Attack]:
    """Return the attacks by the names under which they were requested, clean first."""
    resolved: dict[str, Attack] = {Clean.name: Clean()}
    if not isinstance(attacks, Iterable):
        raise UsageError(f"attacks are names such as ('fgsm', 'pgd10'), or attacks; got {describe(attacks)}")
    for requested in [name.strip() for name in attacks.split(",")] if isinstance(attacks, str) else attacks:
        attack = library.create(requested, step_size) if isinstance(requested, str) else requested
        check_interface("an attack", [attack], ("settings", "__call__"))
        name = requested if isinstance(requested, str) else _checked_name("an attack", requested)
        choose_threat(attack, threat)
        if name == WORST or _poses_as_autoattack(name, attack) or resolved.get(name, attack) != attack:
            raise UsageError(f"the name '{name}' is taken; rename your attack")
        for stage in attack.stages if isinstance(attack, StagedAttack) else ():
            if _checked_name("a search", stage) == Clean.name:
                raise UsageError(f"the name '{Clean.name}' is taken; rename the search of '{name}'")
        resolved[name] = attack
    count = sum(len(set(reported_stages(attack))) or 1 for attack in resolved.values())
    if count > MAX_LABELS:
        raise UsageError(
            f"a result file holds at most {MAX_LABELS} attacks and stages, clean included; got {count}: evaluate fewer "
            f"at a time"
        )
    return resolved


def _poses_as_autoattack(name: str, attack: Attack) -> bool:
    """Return whether an attack has the name of AutoAttack, which reports trust, but other searches."""
    if not is_autoattack(name):
        return False
    own, known = (getattr(one, "stages", None) for one in (attack, library.create(name)))
    return bool(own != known)


def _checked_name(kind: str, named: object) -> str:
    """Return the name of an attack or search; raise UsageError unless it can be printed, and written to every file."""
    name: object = getattr(named, "name", None)
    if not isinstance(name, str) or not name.strip() or not name.isprintable():
        raise UsageError(f"the name of {kind} must be a text that can be printed; got {describe(name)}")
    return name


def _resolve_corruptions(
    corruptions: Iterable[str], attacks: dict[str, Attack], targets: object
) -> dict[str, Corruption]:
    """Return corruptions at every severity by name."""
    if not isinstance(corruptions, Iterable):
        raise UsageError(
            f"corruptions are names such as ('gaussian-noise', 'jpeg'), or 'all'; got {describe(corruptions)}"
        )
    corrupting = resolve(corruptions) if corruptions else {}
    if corrupting and targets is not None:
        raise UsageError("corruptions push images towards no class: leave out targets or corruptions")
    if taken := set(corrupting) & set(attacks):
        raise UsageError(f"the name '{min(taken)}' is taken; rename your attack")
    return corrupting


def _check_takes_targets(attacks: dict[str, Attack]) -> None:
    """Raise UsageError if an attack cannot push images towards a class."""
    for name, attack in attacks.items():
        searched = isinstance(attack, StagedAttack | Clean)
        if not searched and "targets" not in inspect.signature(attack.__call__).parameters:
            raise UsageError(f"the attack '{name}' takes no targets: leave it out, or add targets to its __call__")


@contextmanager
def _alone(meter: ProgressMeter) -> Iterator[None]:
    """Wait for evaluations in other threads: the mode of a model and the precision of PyTorch belong to the process."""
    if not _lock.acquire(blocking=False):
        meter.notify("waiting for another evaluation in this process ...")
        _lock.acquire()
    try:
        yield
    finally:
        _lock.release()


def _world(shard: bool) -> AbstractContextManager[World]:
    """Return the processes that share the examples, as a context; raise UsageError if there is no process group."""
    if not shard:
        return nullcontext(SINGLE)
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            "shard=True needs a process group: start with torchrun and call torch.distributed.init_process_group"
        )
    return init()


def _progress_path(path: str | os.PathLike[str] | None, world: World) -> Path | None:
    """Return the path of this process's progress file."""
    if path is None or world.size == 1:
        return None if path is None else Path(path)
    return Path(path).with_name(f"{Path(path).name}-{world.rank + 1}-of-{world.size}")


def _owned(file: ProgressFile) -> list[Path]:
    """Return the progress file, if it is this evaluation's, and the points that lie beside it."""
    return [] if file.owned_path is None else [file.owned_path, *saved_points(file.owned_path)]
