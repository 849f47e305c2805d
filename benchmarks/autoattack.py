"""Compare our AutoAttack with pyautoattack, the authors' code, on the same model and images.

    python benchmarks/autoattack.py ours runs/cifar10-preact-resnet18-atas --examples 2000
    python benchmarks/autoattack.py authors runs/cifar10-preact-resnet18-atas --examples 2000 --seed 0    # and --seed 1
    python benchmarks/autoattack.py compare     # a page from the files that these wrote

After each of the four attacks, the page shows robust accuracy and the number of examples whose verdicts differ, also
between two seeds of pyautoattack. pyautoattack runs with PyTorch's defaults (float32, TF32 convolutions), ours with its
own (float16 search, float32 verdicts).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import atas
from atas._utils import environment
from atas.distributed.world import select_device
from atas.training import Run
from atas.training.data import load_data

STAGES = ("apgd-ce", "apgd-t", "fab-t", "square")
RESULTS = Path(__file__).parent.parent / "results" / "autoattack"


def main() -> None:
    """Attack and write the results, or compare written results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ours", "authors", "compare"))
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=1000, help="of pyautoattack")
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    if chosen.what == "compare":
        compare(chosen.out)
        return
    if chosen.run is None:
        parser.error("give the folder of a run")
    run = Run.load(chosen.run)
    device = select_device("auto")
    model, test = run.model.to(device).eval(), load_data(run.recipe, None).test
    images, labels = test.images[: chosen.examples], test.labels[: chosen.examples]
    about = {
        "who": "atas" if chosen.what == "ours" else "pyautoattack",
        "recipe": run.recipe.name,
        "training_seed": run.recipe.training.seed,
        "threat": str(run.recipe.threat),
        "examples": len(labels),
        "seed": chosen.seed,
        "environment": environment.environment_info(device),
    }
    chosen.out.mkdir(parents=True, exist_ok=True)
    path = chosen.out / f"{run.recipe.name}-{len(labels)}-{about['who']}-seed{chosen.seed}.json"
    if chosen.what == "ours":
        rows = ours(model, images, labels, run.recipe.threat, chosen.seed)
    else:
        x, y = images.to(device).float() / 255, labels.to(device)
        rows = authors(model, x, y, run.recipe.threat, chosen.seed, chosen.batch_size)
    for row in rows:
        path.write_text(json.dumps(about | row, indent=1) + "\n")
        print(path, {key: value for key, value in row.items() if key != "holds"}, flush=True)


def ours(
    model: torch.nn.Module, images: Tensor, labels: Tensor, threat: atas.Threat, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield the verdicts and accuracies after each attack; a first small evaluation compiles everything."""
    warm_up = min(len(labels), 64)
    atas.evaluate(model, images[:warm_up], labels[:warm_up], threat, attacks=("autoattack",), seed=seed)
    began = time.perf_counter()
    result = atas.evaluate(model, images, labels, threat, attacks=("autoattack",), seed=seed)
    seconds = time.perf_counter() - began
    broken_by = result.broken_by["autoattack"]
    holds, right = [], result.correct["clean"].clone()
    for stage in STAGES:
        right = right & torch.tensor([name != stage for name in broken_by])
        holds.append(right)
    yield figures(holds, seconds) | {
        "stage_seconds": {stage.name: stage.seconds for stage in result.stages["autoattack"]},
        "queries": result.queries["autoattack"],
        "protocol": result.protocol,
        "warnings": [str(warning) for warning in result.warnings],
    }


def authors(
    model: torch.nn.Module, x: Tensor, y: Tensor, threat: atas.Threat, seed: int, batch_size: int
) -> Iterator[dict[str, Any]]:
    """Yield the same for pyautoattack, which runs each attack on the examples that are still correct."""
    from pyautoattack import AutoAttack

    norm = {"linf": "Linf", "l2": "L2"}[threat.name]
    attack = AutoAttack(model, norm=norm, eps=threat.eps, seed=seed, device=str(x.device))
    began, holds, times = time.perf_counter(), [], {}
    with torch.no_grad():
        right = torch.cat([model(part).argmax(1) for part in x.split(batch_size)]) == y
    for stage in STAGES:
        attack.attacks_to_run = [stage]
        started = time.perf_counter()
        if right.any():
            point, _ = attack.run_standard_evaluation(x[right], y[right], batch_size=batch_size)
            with torch.no_grad():
                guess = torch.cat([model(part).argmax(1) for part in point.split(batch_size)])
            right[right.clone()] = guess == y[right]
        times[stage] = time.perf_counter() - started
        holds.append(right.cpu().clone())
        yield figures(holds, time.perf_counter() - began) | {"stage_seconds": times}


def figures(holds: list[Tensor], seconds: float) -> dict[str, Any]:
    """Return the robust accuracy after each attack, and the verdicts as digits."""
    return {
        "seconds": seconds,
        "robust": {stage: int(right.sum()) / len(right) for stage, right in zip(STAGES, holds, strict=False)},
        "holds": {stage: "".join(map(str, right.int().tolist())) for stage, right in zip(STAGES, holds, strict=False)},
    }


def compare(folder: Path) -> None:
    """Write README.md: a table for every model, and the numbers of differing verdicts."""
    rows = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    rows = [row for row in rows if len(row["robust"]) == len(STAGES)]  # skip interrupted runs
    lines = ["# AutoAttack, ours beside pyautoattack", "", "Made by `python benchmarks/autoattack.py compare`.", ""]
    for key in sorted({about(row) for row in rows}):
        recipe, training_seed, examples = key
        group = [row for row in rows if about(row) == key]
        lines += [
            f"## {recipe}, seed {training_seed}, {group[0]['threat']}, the first {examples:,} test images",
            "",
            "Robust accuracy (%) after each attack, and the time of all four.",
            "",
            f"| | {' | '.join(STAGES)} | seconds | device |",
            "|---|" + "---|" * (len(STAGES) + 2),
        ]
        for row in group:
            robust = [f"{100 * row['robust'][stage]:.2f}" for stage in STAGES]
            seconds = "-" if "note" in row else f"{row['seconds']:.0f}"  # a note says that other jobs ran beside it
            cells = [name(row), *robust, seconds, row["environment"]["device"]]
            lines.append(f"| {' | '.join(cells)} |")
        lines += ratios(group)
        if len(group) > 1:
            lines += ["", "Examples on which two verdicts differ:", "", f"| | {' | '.join(STAGES)} |"]
            lines.append("|---|" + "---|" * len(STAGES))
            for a, b in combinations(group, 2):
                lines.append(f"| {name(a)}, {name(b)} | {' | '.join(map(str, differences(a, b)))} |")
        lines.append("")
    (folder / "README.md").write_text("\n".join(lines))


def ratios(group: list[dict[str, Any]]) -> list[str]:
    """Return how much longer pyautoattack took than ours, for runs alone on one device at one commit."""
    alone = [row for row in group if "note" not in row]
    lines = []
    for mine, other in ((a, b) for a in alone for b in alone if a["who"] == "atas" != b["who"]):
        if all(mine["environment"][key] == other["environment"][key] for key in ("device", "commit")):
            lines += [
                "",
                f"{name(other)}, took {other['seconds'] / mine['seconds']:.1f} times as long as {name(mine)}.",
            ]
    return lines


def about(row: dict[str, Any]) -> tuple[str, int, int]:
    """Return the model and images of a row; rows with equal ones are compared."""
    return row["recipe"], row["training_seed"], row["examples"]


def name(row: dict[str, Any]) -> str:
    """Return the implementation and the seed."""
    return f"{row['who']}, seed {row['seed']}"


def differences(first: dict[str, Any], second: dict[str, Any]) -> list[int]:
    """Return on how many examples two rows disagree after each attack."""
    pairs = ((first["holds"][stage], second["holds"][stage]) for stage in STAGES)
    return [sum(a != b for a, b in zip(*pair, strict=True)) for pair in pairs]


if __name__ == "__main__":
    main()
