"""Accuracy under attack, example by example."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from atas import attacks as library
from atas._version import __version__
from atas.attacks import Attack, Clean
from atas.checks import check_module
from atas.environment import describe
from atas.errors import UsageError
from atas.evaluation._answers import ANSWERS, answers
from atas.evaluation._cautions import Caution
from atas.evaluation._checks import SAMPLE, Checks
from atas.evaluation._data import MapDataset, open_source
from atas.evaluation._figures import figures, together
from atas.evaluation._fingerprint import weights_hash
from atas.evaluation._journal import Journal
from atas.evaluation._model import current, dtype_of, place_of
from atas.evaluation._portions import Reader
from atas.evaluation._result import WORST, Evaluation
from atas.evaluation._search import Runner, ready, usual_lanes
from atas.evaluation._shards import Shard, sharing
from atas.evaluation._status import Meter, Watcher
from atas.evaluation._work import Outcome, Work, passes_at_most
from atas.threat import Threat

_HANDFUL = 4  # images by which a model is known again
_CLASSES = 10  # to guess how long it will take, before the model has said how many there are
_VERDICT = (
    "prediction at the point that the attack returned (PGD: last iterate, worst over restarts; searches: any point "
    "inside the ball, confirmed by the model in full precision)"
)


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
    progress: Watcher | None = None,
    progress_file: str | os.PathLike[str] | None = None,
    shard: bool = False,
) -> Evaluation:
    """Measure a model's accuracy on clean images and under attacks, each on all examples.

    An example counts as right under an attack if the model's prediction at the point that the attack returned is the
    label. Verdicts are given in eval mode and in float32 without TF32 or autocast (in float64 if the model's weights
    are); all of that is put back at the end. They depend neither on the batch size nor on the other attacks.

    The result says how far it can be trusted: `warnings` holds what was seen of models that give different answers to
    the same image, return no logits, or have gradients that mislead attacks.

    Args:
        model: maps images (N, C, H, W) in [0, 1] to logits (N, classes); it is never moved.
        images: float in [0, 1] or uint8, NCHW, as a tensor or an array; or, without labels, a dataset of
            (image, label) pairs, or an object with tensors `images` and `labels`, such as `atas.data.load(...).test`.
        labels: integers (N,).
        threat: what the attacks may do, such as `atas.Linf(8/255)`.
        attacks: names as in `atas.attacks.names()`, or attacks of your own. `clean` need not be named. A text is read
            as on the command line: "pgd10,autoattack".
        batch_size: how many images at a time; 1024 on CUDA and 256 elsewhere, if not given.
        device: where batches are moved; the model's device if not given.
        seed: another seed gives other random starts.
        step_size: of every PGD, in pixel units; eps/5 if not given.
        precision: of the search for adversarial inputs: `auto`, what is fastest on the device, or `float32`. What is
            found counts only if it fools the model in float32.
        progress: called with a `Status` now and then: what is being done, and how long the rest will take at most.
        progress_file: where to keep what is known so far. After a stop, the same call goes on from there, with the same
            verdicts. The file stays until the result is safe: `save` of the result removes it.
        shard: share the examples among the processes of torch.distributed. All of them must call this, with the same
            arguments, and all get the whole result.

    >>> from atas import Linf
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(16, 4))
    >>> x, y = torch.rand(50, 1, 4, 4), torch.randint(4, (50,))
    >>> result = evaluate(model, x, y, Linf(8/255), attacks=("fgsm", "pgd10"))
    >>> list(result.accuracy), result.accuracy["worst"] <= result.accuracy["pgd10"]
    (['clean', 'fgsm', 'pgd10', 'worst'], True)
    """
    check_module(model)
    if not isinstance(threat, Threat):
        found = "is missing" if threat is None else f"cannot be {threat!r}"
        raise UsageError(f"the threat model {found}; give it after the labels, such as threat=atas.Linf(8/255)")
    chosen = _chosen(attacks, step_size)
    settings = {name: attack.settings(threat) for name, attack in chosen.items()}
    source = open_source(images, labels)
    place, dtype = place_of(model, source.device, device), dtype_of(model)
    lanes = usual_lanes(place) if batch_size is None else batch_size
    if lanes < 1:
        raise UsageError(f"batch_size must be at least 1; got {batch_size}")

    meter = Meter(progress)
    with torch.inference_mode(False), current(place), sharing(shard) as part:
        reader = Reader(source, dtype)
        threat.check_images(reader.shape)
        weights, data = weights_hash(model), part.from_first(reader.digest() if part.rank == 0 else "")
        _, few, _ = reader.sample(SAMPLE)
        passes = len(reader) // part.count * passes_at_most(chosen.values(), _CLASSES)
        with ready(model, place, precision=precision, lanes=lanes, images=few, passes=passes, say=meter.say) as runner:
            identity = {
                "weights": weights,
                "data": data,
                "examples": len(reader),
                "threat": [threat.name, threat.eps],
                "attacks": settings,
                "seed": seed,
                "precision": [str(dtype), runner.precision],
                "processes": [part.rank, part.count],
                "atas": __version__,
                ANSWERS: answers(runner.judge, few[: min(lanes, _HANDFUL)].to(place)),
            }
            journal = Journal(_file_of(progress_file, part), identity, meter.say)
            outcomes, cautions, seconds = _run(model, runner, chosen, threat, seed, reader, part, journal, meter)
            kept = [path for path in part.gather(journal.kept) if path is not None]

    return Evaluation(
        threat=threat,
        **figures(chosen, outcomes),
        warnings=tuple(cautions),
        protocol={
            "attacks": settings,
            "verdict": _VERDICT,
            "seed": seed,
            "precision": str(dtype).removeprefix("torch."),
            "search_precision": runner.precision,
            "tf32": False,
            "mode": "eval",
            "image_shape": list(reader.shape),
            "batch_size": lanes,
            "processes": part.count,
            "checks_seconds": seconds,
        },
        environment=describe(place),
        weights=weights,
        data=data,
        progress_files=tuple(kept),
    )


def _run(
    model: nn.Module,
    runner: Runner,
    chosen: dict[str, Attack],
    threat: Threat,
    seed: int,
    reader: Reader,
    part: Shard,
    journal: Journal,
    meter: Meter,
) -> tuple[dict[str, Outcome], list[Caution], float]:
    """What each attack came to on all examples, the warnings, and the seconds that were spent on them alone."""
    rows = part.rows(len(reader))
    portions = reader.portions(rows)
    began = time.perf_counter()
    checks = Checks(model, runner, threat, seed, *reader.sample(SAMPLE))
    cautions = checks.before() if part.rank == 0 else []
    seconds = time.perf_counter() - began
    for caution in cautions:
        meter.say(f"warning: {caution}")

    work = Work(model, runner, chosen, threat, seed, journal, meter)
    work.plan([len(portion) for portion in portions], checks.classes)
    for number, portion in enumerate(portions):
        if not work.is_done(number):
            work.do(number, *reader.read(portion), torch.tensor(portion))
    outcomes = together(part.gather((rows, work.outcomes(len(portions)))), len(reader))

    began = time.perf_counter()
    if part.rank == 0:
        cautions += checks.after(chosen, {name: outcome.code for name, outcome in outcomes.items()})
    return outcomes, part.from_first(cautions), seconds + time.perf_counter() - began


def _chosen(attacks: Iterable[str | Attack], step_size: float | None) -> dict[str, Attack]:
    """Every attack under the name that it was asked for by, clean first."""
    chosen: dict[str, Attack] = {Clean.name: Clean()}
    for wanted in [name.strip() for name in attacks.split(",")] if isinstance(attacks, str) else attacks:
        attack = library.create(wanted, step_size) if isinstance(wanted, str) else wanted
        name = wanted if isinstance(wanted, str) else wanted.name
        if name == WORST or chosen.get(name, attack) != attack:
            raise UsageError(f"the name '{name}' is taken; give your attack another name")
        chosen[name] = attack
    return chosen


def _file_of(path: str | os.PathLike[str] | None, part: Shard) -> Path | None:
    """Every process has a progress file of its own."""
    if path is None or part.count == 1:
        return None if path is None else Path(path)
    return Path(path).with_name(f"{Path(path).name}-{part.rank + 1}-of-{part.count}")
