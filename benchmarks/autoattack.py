"""Our AutoAttack beside pyautoattack, the authors' code: the same model, images and machine, in one run.

    python benchmarks/autoattack.py runs/cifar10-preact-resnet18-atas --examples 2000 --seeds 0 1
    python benchmarks/autoattack.py runs/cifar10-preact-resnet18-atas --ours-only     # all test images, ours alone

Compared after each of the four attacks: robust accuracy, and on how many examples the verdicts differ, beside the same
figures for two seeds of pyautoattack. Written to results/autoattack as JSON; pyautoattack runs as it comes, in float32
with TF32 convolutions as PyTorch's defaults have it, ours by its defaults (float16 search, float32 verdicts).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import atas
from atas import environment
from atas.training import Run
from atas.training.engine import choose_device
from atas.training.run import load_data

STAGES = ("apgd-ce", "apgd-t", "fab-t", "square")
RESULTS = Path(__file__).parent.parent / "results" / "autoattack"


def main() -> None:
    """Compare, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1], help="of pyautoattack; ours runs with the first"
    )
    parser.add_argument("--batch-size", type=int, default=1000, help="of pyautoattack")
    parser.add_argument("--ours-only", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    run = Run.load(chosen.run)
    device = choose_device("auto")
    model, test = run.model.to(device).eval(), load_data(run.recipe, None).test
    images, labels = test.images[: chosen.examples], test.labels[: chosen.examples]
    document: dict[str, Any] = {
        "recipe": run.recipe.name,
        "seed": run.recipe.training.seed,
        "threat": str(run.recipe.threat),
        "examples": len(labels),
        "environment": environment.describe(device),
    }
    chosen.out.mkdir(parents=True, exist_ok=True)
    path = chosen.out / f"{run.recipe.name}-{len(labels)}.json"

    def keep(name: str, row: dict[str, Any]) -> None:
        document[name] = row
        path.write_text(json.dumps(document, indent=1) + "\n")
        print(name, {key: value for key, value in row.items() if key != "holds"}, flush=True)

    mine, row = ours(model, images, labels, run.recipe.threat, chosen.seeds[0])
    keep("ours", row)
    if chosen.ours_only:
        return
    x, y = images.to(device).float() / 255, labels.to(device)
    theirs = []
    for seed in chosen.seeds:
        holds, row = authors(model, x, y, run.recipe.threat, seed, chosen.batch_size)
        theirs.append(holds)
        keep(f"pyautoattack, seed {seed}", row)
    keep("verdicts that differ, ours and pyautoattack's first seed", differences(mine, theirs[0]))
    if len(theirs) > 1:
        keep("verdicts that differ, pyautoattack's first two seeds", differences(theirs[0], theirs[1]))
    keep("times as fast", {"all": row["seconds"] / document["ours"]["seconds"]})


def ours(
    model: torch.nn.Module, images: Tensor, labels: Tensor, threat: atas.Threat, seed: int
) -> tuple[list[Tensor], dict[str, Any]]:
    """Whether each example holds after each attack, and the figures; timed with everything compiled."""
    few = min(len(labels), 64)
    atas.evaluate(model, images[:few], labels[:few], threat, attacks=("autoattack",), seed=seed)
    began = time.perf_counter()
    found = atas.evaluate(model, images, labels, threat, attacks=("autoattack",), seed=seed)
    seconds = time.perf_counter() - began
    broken_by = found.broken_by["autoattack"]
    holds, right = [], found.correct["clean"].clone()
    for stage in STAGES:
        right = right & torch.tensor([name != stage for name in broken_by])
        holds.append(right)
    row = figures(holds, seconds) | {
        "stage_seconds": {stage.name: stage.seconds for stage in found.stages["autoattack"]},
        "queries": found.queries["autoattack"],
        "protocol": found.protocol,
        "warnings": [str(warning) for warning in found.warnings],
    }
    return holds, row


def authors(
    model: torch.nn.Module, x: Tensor, y: Tensor, threat: atas.Threat, seed: int, batch_size: int
) -> tuple[list[Tensor], dict[str, Any]]:
    """The same by pyautoattack, an attack at a time, each on the examples that hold."""
    from pyautoattack import AutoAttack

    norm = {"linf": "Linf", "l2": "L2"}[threat.name]
    attack = AutoAttack(model, norm=norm, eps=threat.eps, seed=seed, device=str(x.device))
    began, holds, times = time.perf_counter(), [], {}
    with torch.no_grad():
        right = torch.cat([model(part).argmax(1) for part in x.split(batch_size)]) == y
    for stage in STAGES:
        attack.attacks_to_run = [stage]
        started = time.perf_counter()
        point, _ = attack.run_standard_evaluation(x[right], y[right], batch_size=batch_size)
        with torch.no_grad():
            guess = torch.cat([model(part).argmax(1) for part in point.split(batch_size)])
        right[right.clone()] = guess == y[right]
        times[stage] = time.perf_counter() - started
        holds.append(right.cpu().clone())
    return holds, figures(holds, time.perf_counter() - began) | {"stage_seconds": times}


def figures(holds: list[Tensor], seconds: float) -> dict[str, Any]:
    """Robust accuracy after each attack, and the verdicts as digits."""
    return {
        "seconds": seconds,
        "robust": {stage: int(right.sum()) / len(right) for stage, right in zip(STAGES, holds, strict=True)},
        "holds": {stage: "".join(map(str, right.int().tolist())) for stage, right in zip(STAGES, holds, strict=True)},
    }


def differences(first: list[Tensor], second: list[Tensor]) -> dict[str, int]:
    """On how many examples two lists of verdicts disagree, after each attack."""
    return {stage: int((a != b).sum()) for stage, a, b in zip(STAGES, first, second, strict=True)}


if __name__ == "__main__":
    main()
