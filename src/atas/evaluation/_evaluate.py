"""Accuracy under attack, example by example."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from atas import attacks as library
from atas.attacks import Attack, Clean, checked_logits, correct
from atas.checks import check_labels
from atas.environment import describe
from atas.errors import UsageError
from atas.evaluation._data import MapDataset, open_source
from atas.evaluation._fingerprint import DataHash, weights_hash
from atas.evaluation._precision import full_precision
from atas.evaluation._result import Evaluation
from atas.passes import mode
from atas.threat import Threat

_WORST = "worst"
_BATCH = {"cuda": 1024}
_BATCH_ELSEWHERE = 256

Progress = Callable[[str, int, int], None]


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
    progress: Progress | None = None,
) -> Evaluation:
    """Measure a model's accuracy on clean images and under attacks, each on all examples.

    An example counts as right under an attack if the model's prediction at the point that the attack returned is the
    label. The model runs in eval mode and in float32 without TF32 or autocast (in float64 if its weights are); all of
    that is put back at the end. Verdicts depend neither on the batch size nor on the other attacks.

    Args:
        model: maps images (N, C, H, W) in [0, 1] to logits (N, classes); it is never moved.
        images: float in [0, 1] or uint8, NCHW, as a tensor or an array; or, without labels, a dataset of
            (image, label) pairs, or an object with tensors `images` and `labels`, such as `atas.data.load(...).test`.
        labels: integers (N,).
        threat: what the attacks may do, such as `atas.Linf(8/255)`.
        attacks: names as in `atas.attacks.names()`, or attacks of your own. `clean` need not be named.
        batch_size: 1024 on CUDA and 256 elsewhere, if not given.
        device: where batches are moved; the model's device if not given.
        seed: another seed gives other random starts.
        step_size: of every PGD, in pixel units; eps/5 if not given.
        progress: called as `progress(attack, examples done, examples in all)` after each batch of each attack.

    >>> from atas import Linf
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4))
    >>> x, y = torch.rand(50, 1, 4, 4), torch.randint(4, (50,))
    >>> result = evaluate(model, x, y, Linf(8/255), attacks=("fgsm", "pgd10"))
    >>> list(result.accuracy), result.accuracy["worst"] <= result.accuracy["pgd10"]
    (['clean', 'fgsm', 'pgd10', 'worst'], True)
    """
    if not isinstance(threat, Threat):
        raise UsageError("the threat model is missing; give it after the labels, such as threat=atas.Linf(8/255)")
    chosen = _chosen(attacks, step_size)
    settings = {name: attack.settings(threat) for name, attack in chosen.items()}
    source = open_source(images, labels)
    place = _place(model, source.device, device)
    dtype = _dtype(model)
    if batch_size is None:
        batch_size = _BATCH.get(place.type, _BATCH_ELSEWHERE)
    if batch_size < 1:
        raise UsageError(f"batch_size must be at least 1; got {batch_size}")

    verdicts: dict[str, list[Tensor]] = {name: [] for name in chosen}
    seconds = dict.fromkeys(chosen, 0.0)
    fingerprint, shape = DataHash(), torch.Size()
    with mode(model, training=False), full_precision(place):
        for start in range(0, len(source), batch_size):
            x, y = source.batch(start, start + batch_size, dtype)
            fingerprint.update(x, y)
            shape = x.shape[1:]
            x, y, index = x.to(place), y.to(place), torch.arange(start, start + len(x), device=place)
            for name, attack in chosen.items():
                began = time.perf_counter()
                point = attack(model, x, y, threat, seed=seed, index=index)
                verdicts[name].append(_verdicts(model, point, y))
                seconds[name] += time.perf_counter() - began
                if progress is not None:
                    progress(name, start + len(x), len(source))

    right = {name: torch.cat(parts) for name, parts in verdicts.items()}
    return Evaluation(
        threat=threat,
        correct=right | {_WORST: torch.stack(list(right.values())).all(0)},
        seconds=seconds | {_WORST: sum(seconds.values())},
        protocol={
            "attacks": settings,
            "verdict": "prediction at the point that the attack returned (PGD: last iterate, worst over restarts)",
            "seed": seed,
            "precision": str(dtype).removeprefix("torch."),
            "tf32": False,
            "mode": "eval",
            "image_shape": list(shape),
            "batch_size": batch_size,
        },
        environment=describe(place),
        weights=weights_hash(model),
        data=fingerprint.hexdigest(),
    )


def _verdicts(model: nn.Module, point: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        logits = checked_logits(model(point), len(y))
    check_labels(y, logits.shape[1])
    return correct(logits, y).cpu()


def _chosen(attacks: Iterable[str | Attack], step_size: float | None) -> dict[str, Attack]:
    """Every attack under the name that it was asked for by, clean first."""
    chosen: dict[str, Attack] = {Clean.name: Clean()}
    for wanted in (attacks,) if isinstance(attacks, str) else attacks:
        if isinstance(wanted, str):
            chosen[wanted] = library.create(wanted, step_size)
        elif wanted.name in (*chosen, _WORST):
            raise UsageError(f"the name '{wanted.name}' is taken; give your attack another name")
        else:
            chosen[wanted.name] = wanted
    return chosen


def _place(model: nn.Module, images: torch.device, wanted: torch.device | str | None) -> torch.device:
    first = next(itertools.chain(model.parameters(), model.buffers()), None)
    home = images if first is None else first.device
    try:
        place = home if wanted is None else torch.empty(0, device=wanted).device  # "cuda" is then "cuda:0"
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"there is no device '{wanted}' here: leave device out to use the model's") from error
    if first is not None and place != home:
        raise UsageError(f"the model lives on {home} and is never moved: move it with model.to('{place}')")
    return place


def _dtype(model: nn.Module) -> torch.dtype:
    weights: list[Any] = list(model.parameters()) or list(model.buffers())
    found = {tensor.dtype for tensor in weights if tensor.dtype.is_floating_point}
    if short := sorted(str(dtype) for dtype in found - {torch.float32, torch.float64}):
        raise UsageError(f"the model holds {short[0]} weights, and evaluation is in float32: pass model.float()")
    return torch.float64 if found == {torch.float64} else torch.float32
