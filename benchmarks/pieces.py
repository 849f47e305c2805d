"""What each piece of `atas-plus`, and each further one, adds to a training step of ATAS.

    python benchmarks/pieces.py --out results/speed/pieces.json

Every variant is a recipe of PreActResNet-18 with CIFAR-10's shapes and random images. All are built first, and rounds
over them are interleaved, so that a slower machine slows all of them; the median round counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from atas import data
from atas._utils import environment
from atas.distributed.world import select_device
from atas.recipes import load
from atas.training.build import build, build_model
from atas.training.engine import Engine

ATAS, PLUS = "cifar10-preact-resnet18-atas", "cifar10-preact-resnet18-plus-100s"
VIEWS = {"data.view": "cropshift", "data.erase": 0.5}
HALF = {"method.name": "benchmarks.trial_methods:HalfATAS", "training.batch_size": 256}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "atas": (ATAS, {}),
    "atas, average of weights": (ATAS, {"training.ema": 0.999}),
    "atas, label smoothing": (ATAS, {"targets.smoothing": 0.1}),
    "atas, remembered predictions": (ATAS, {"targets.smoothing": 0.1, "targets.share": 0.4}),
    "atas-plus": (PLUS, {}),
    "atas-plus, CropShift": (PLUS, {"data.view": "cropshift"}),
    "atas-plus, erasing": (PLUS, {"data.erase": 0.5}),
    "atas-plus, CropShift and erasing": (PLUS, VIEWS),
    "atas-plus, weights perturbed along the momentum": (PLUS, {"optimizer.perturb": "momentum"}),
    "atas-plus, weights perturbed along the attack's gradient": (PLUS, {"optimizer.perturb": "attack"}),
    "atas-plus, consistency of predictions": (PLUS, {"consistency.weight": 1.0}),
    "atas-plus, alternating flips": (PLUS, {"data.flip": "alternate"}),
    "atas-plus, batches of 256": (PLUS, {"training.batch_size": 256}),
    "atas-plus, batches of 512": (PLUS, {"training.batch_size": 512}),
    "atas-plus, Muon": (PLUS, {"optimizer.name": "muon"}),
    "atas-plus, Muon, batches of 512": (PLUS, {"optimizer.name": "muon", "training.batch_size": 512}),
    "atas-plus, half of each batch of 256 attacked": (PLUS, HALF),
    "atas-plus, stale perturbations": (PLUS, {"method.name": "benchmarks.trial_methods:StaleATAS"}),
}
WARMUP_STEPS = 3


def random_images(examples: int) -> data.Dataset:
    """Return random images of CIFAR-10's shape; speed does not depend on their content."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (examples, 3, 32, 32), dtype=torch.uint8, generator=generator)
    labels = torch.randint(10, (examples,), generator=generator)
    split = data.Split(pixels, labels, tuple(str(label) for label in range(10)))
    return data.Dataset("random", split, split)


def engine(recipe: str, values: dict[str, Any], images: data.Dataset, logged: list[str]) -> Engine:
    """Return the engine of a recipe, ready for its last epoch but one."""
    resolved = load(recipe).with_values(values)
    made = build(resolved, images, build_model(resolved, images), logged.append).engine
    made.prepare(resolved.training.epochs - 2)
    return made


def milliseconds(made: Engine, steps: int, device: torch.device) -> float:
    """Return the mean time of a step."""
    made.start_epoch(made.recipe.training.epochs - 2, 0)
    for _ in range(WARMUP_STEPS):
        made.step()
    _wait(device)
    began = time.perf_counter()
    for _ in range(steps):
        made.step()
    _wait(device)
    return (time.perf_counter() - began) / steps * 1e3


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Time all variants, and write each one's median, range and ratio to ATAS."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/speed/pieces.json"))
    parser.add_argument("--steps", type=int, default=100, help="steps in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--examples", type=int, default=50_000)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    chosen = parser.parse_args()
    device, images = select_device("auto"), random_images(chosen.examples)
    logs: dict[str, list[str]] = {name: [] for name in chosen.only}
    engines = {name: engine(*VARIANTS[name], images, logs[name]) for name in chosen.only}
    rounds = [
        {name: milliseconds(made, chosen.steps, device) for name, made in engines.items()} for _ in range(chosen.rounds)
    ]
    first = next(iter(engines))
    rows = {}
    for name, made in engines.items():
        times = [one[name] for one in rounds]
        ratio = statistics.median(one[name] / one[first] for one in rounds)
        recipe, values = VARIANTS[name]
        rows[name] = {
            "recipe": recipe,
            "values": values,
            "engine": made.kind,
            "milliseconds": statistics.median(times),
            "range": [min(times), max(times)],
            "seconds per epoch": statistics.median(times) * 1e-3 * chosen.examples / made.recipe.training.batch_size,
            f"ratio to {first}": ratio,
            "log": logs[name],
        }
        each = (
            f"{rows[name]['milliseconds']:7.3f} ms   x {ratio:.3f}   {rows[name]['seconds per epoch']:.3f} s an epoch"
        )
        print(f"{name:58} {each}   {'; '.join(logs[name])}", flush=True)
    result = {
        "environment": environment.environment_info(device),
        "rows": rows,
    }
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
