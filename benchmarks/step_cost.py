"""The cost of a training step of each method, relative to a standard step on the same model in the same run.

    python benchmarks/step_cost.py                       # PreActResNet-18, batch 32, on the CPU or the GPU
    python benchmarks/step_cost.py --json results.json

Rounds over all methods are interleaved, so that a slower machine slows all of them; the median round counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

import atas
from atas._utils import environment
from atas.data.loader import DeviceLoader
from atas.distributed.world import select_device
from atas.recipes import load
from atas.training.engine import Engine

RECIPES = {"atas-plus": "plus-30s"}  # where it is not the name of the method


def engine(name: str, args: argparse.Namespace, device: torch.device) -> Engine:
    recipe = RECIPES.get(name, name)
    settings = load(f"cifar10-preact-resnet18-{recipe}").with_values(
        {"training.batch_size": args.batch, "engine.precision": args.precision, "model.name": args.model}
    )
    torch.manual_seed(0)
    examples = args.batch * (args.rounds + 2)
    images = torch.randint(256, (examples, 3, 32, 32), dtype=torch.uint8)
    labels = torch.randint(10, (examples,))
    batches = DeviceLoader(images, labels, batch_size=args.batch, pad=4, flip=True, seed=0, device=device)
    own = dict(settings.method.settings)
    own |= {"batch_size": args.batch} if "batch_size" in atas.methods.settings(name) else {}
    own |= {"classes": 10} if atas.methods.takes_classes(name) else {}
    method = atas.methods.create(name, settings.threat, examples, (3, 32, 32), device=device, **own)
    made = Engine(settings, atas.models.create(args.model, 10).to(device), method, batches)
    made.start_epoch(min(10, settings.training.epochs - 1), 0)
    return made


def timed(made: Engine, device: torch.device) -> float:
    began = time.perf_counter()
    made.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="preact-resnet18")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--methods", nargs="*", default=atas.methods.names())
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = select_device(args.device)
    names = list(dict.fromkeys(["standard", *args.methods]))
    engines = {name: engine(name, args, device) for name in names}
    for made in engines.values():
        timed(made, device)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(args.rounds):
        for name, made in engines.items():
            seconds[name].append(timed(made, device))
    rows = {}
    print(f"{'method':18} {'ms a step':>10} {'relative':>9}   spread of the ratio over rounds")
    for name in names:
        ratios = [value / base for value, base in zip(seconds[name], seconds["standard"], strict=True)]
        rows[name] = {
            "ms": 1e3 * statistics.median(seconds[name]),
            "relative": statistics.median(ratios),
            "low": min(ratios),
            "high": max(ratios),
        }
        row = rows[name]
        print(f"{name:18} {row['ms']:10.1f} {row['relative']:9.2f}   {row['low']:.2f} to {row['high']:.2f}", flush=True)
    if args.json is not None:
        document = {
            "environment": environment.environment_info(device),
            "settings": vars(args) | {"json": None},
            "rows": rows,
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
