"""Training throughput of ATAS at ImageNet's size, and whether data or network limits it.

    python benchmarks/throughput.py                                         # ResNet-18 and ResNet-50 at 224, batch 256
    python benchmarks/throughput.py --sizes 128 160 192 224                 # as in progressive resolution
    python benchmarks/throughput.py --packed data/imagenet --loading streaming --json results/throughput/streaming.json

Images are random and lie on the device, or come from a packed set. Steps are those of the recipe
imagenet-<model>-atas after its warm-up, with the engine of a training; compilation is not timed. The median of several
rounds counts. "Data alone" is the throughput of loading, cropping and resizing the same batches without a step. The
network is the limit if it is well above the training throughput.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from atas import data, recipes
from atas._utils import environment
from atas._utils.files import write_text
from atas.distributed.world import select_device
from atas.training import TrainingProgress
from atas.training.build import build, build_model
from atas.training.engine import Engine

IMAGENET = 1_281_167  # training images


def random_images(count: int, side: int, classes: int) -> data.Dataset:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (count, 3, side, side), dtype=torch.uint8, generator=generator)
    labels = torch.arange(count) % classes
    split = data.Split(pixels, labels, tuple(str(label) for label in range(classes)))
    return data.Dataset("random", split, split)


def settings_for(model: str, shown: int, args: argparse.Namespace) -> recipes.Recipe:
    values = {
        "data.view": args.view,
        "data.view_size": shown,
        "data.size": "none",  # the data set decides
        "data.loading": args.loading,
        "data.workers": args.workers or "none",
        "training.batch_size": args.batch,
        "training.probe": 1,
        "method.grid": args.grid,
        "method.store": args.store,
        "engine.kind": args.engine,
        "engine.device": args.device,
        "engine.precision": args.precision,
    }
    return recipes.load("imagenet-resnet18-atas").with_values(values | {"model.name": model})


def measure(model: str, shown: int, images: data.Dataset, args: argparse.Namespace) -> dict[str, Any]:
    settings = settings_for(model, shown, args)
    network = build_model(settings, images)
    engine = build(settings, images, network, TrainingProgress(quiet=True).log).engine
    device, last = engine.device, settings.training.epochs - 1
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    engine.prepare(last)
    start_up = time.perf_counter() - began
    steps = min(args.steps, len(engine.loader) - 1)
    training = _rounds(lambda: _train(engine, last, steps), steps, args, device)
    alone = _rounds(lambda: _data_alone(engine, last, steps), steps, args, device)
    engine.loader.close()
    return {
        "model": model,
        "shown": shown,
        "engine": engine.kind,
        "precision": engine.precision_name,
        "loading": engine.loader.kind,
        "images_a_second": training,
        "data_alone": alone,
        "start_up_seconds": start_up,
        "peak_gigabytes": torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None,
        "hours_for_90_epochs_of_imagenet": 90 * IMAGENET / training["median"] / 3600,
    }


def _train(engine: Engine, epoch: int, steps: int) -> None:
    engine.start_epoch(epoch, 0)
    for _ in range(steps):
        engine.step()


def _data_alone(engine: Engine, epoch: int, steps: int) -> None:
    order = engine.loader.order(epoch)
    engine.loader.start_epoch(order, 0)
    for batch, index in enumerate(order.split(engine.loader.batch_size)[:steps]):
        engine.loader.prefetch(batch)
        engine.loader.take(index.to(engine.device), engine.method.epoch)


def _rounds(work: Callable[[], None], steps: int, args: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Return the images per second over rounds, after a first one that does not count."""
    speeds = []
    for _ in range(args.rounds + 1):
        _wait(device)
        began = time.perf_counter()
        work()
        _wait(device)
        speeds.append(steps * args.batch / (time.perf_counter() - began))
    return {"median": statistics.median(speeds[1:]), "low": min(speeds[1:]), "high": max(speeds[1:])}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet18", "resnet50"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[224], help="sides of the views in pixels")
    parser.add_argument("--view", default="crop", choices=["crop", "resized"])
    parser.add_argument("--packed", type=Path, help="use a packed set instead of random images")
    parser.add_argument("--images", type=int, default=16_384, help="number of random images")
    parser.add_argument("--stored", type=int, default=256, help="side of the stored random images")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--loading", default="auto", choices=["auto", "resident", "streaming"])
    parser.add_argument("--workers", type=int)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=40, help="per round, fewer than an epoch has")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--grid", type=int, default=32)
    parser.add_argument("--store", default="device", choices=["device", "host"])
    parser.add_argument("--engine", default="auto", choices=["auto", "eager", "captured"])
    parser.add_argument("--precision", default="auto", help="auto is bf16 on CUDA")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    images = data.load("packed", args.packed) if args.packed else random_images(args.images, args.stored, args.classes)
    rows = []
    print(f"{'model':10} {'shown':>5}  {'images/s':>9} {'low':>8} {'high':>8}  {'data alone':>10}  {'90 epochs':>9}")
    for model in args.models:
        for shown in args.sizes:
            row = measure(model, shown, images, args)
            pace = row["images_a_second"]
            print(
                f"{model:10} {shown:5}  {pace['median']:9.0f} {pace['low']:8.0f} {pace['high']:8.0f}  "
                f"{row['data_alone']['median']:10.0f}  {row['hours_for_90_epochs_of_imagenet']:7.1f} h"
            )
            rows.append(row)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        chosen = {key: value for key, value in vars(args).items() if key not in ("json", "packed")}
        chosen["packed"] = args.packed is not None
        about = environment.environment_info(select_device(args.device))
        write_text(args.json, json.dumps({"environment": about, "settings": chosen, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
