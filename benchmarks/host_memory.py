"""ATAS on a synthetic set of ImageNet's size, with perturbations on the host and little memory on the device.

    python benchmarks/host_memory.py                                  # 1,281,167 examples, ResNet-18, 16 GB
    python benchmarks/host_memory.py --store device --dtype float16   # the same with 7.9 GB on the device, to compare
    python benchmarks/host_memory.py --json results/host_memory/resnet18.json

Images are random and seen as random resized crops. Steps are timed at the end of one epoch and the start of the next,
so that both share examples. In the end, stored perturbations are compared with their initial noise: those of trained
examples must differ, all others must not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import atas
from atas._utils import environment
from atas._utils.files import write_text
from atas.core.resized_crop import BoxView
from atas.core.rng import CounterRNG
from atas.data.loader import Batch, DeviceLoader
from atas.distributed.world import select_device
from atas.methods.base import PersistentPerturbation
from atas.recipes import Recipe, from_dict
from atas.training.engine import Engine

IMAGES = 512  # stored images; examples share them


class Synthetic(DeviceLoader):
    """A loader of any number of examples over IMAGES stored images."""

    def take(self, index: Tensor, epoch: Tensor) -> Batch:
        """Return these examples with their views of this epoch."""
        view = self.views(CounterRNG(self.seed, epoch, index))
        return Batch(view.apply(self.images, index % len(self.images)) / 255, self.labels[index], index, view)


def settings_for(args: argparse.Namespace) -> Recipe:
    document = {
        "model": {"name": args.model},
        "method": {"name": "atas", "eps": "2/255", "c": 12.8, "clip": ["4/255", "8/255"], "warmup_epochs": 0,
                   "grid": args.grid, "dtype": args.dtype, "store": args.store},
        "optimizer": {"weight_decay": 1e-4},
        "training": {"epochs": 2, "batch_size": args.batch},
        "engine": {"kind": args.engine, "device": args.device, "precision": args.precision},
    }  # fmt: skip
    return from_dict(document, "host-memory")


def make_engine(args: argparse.Namespace, device: torch.device) -> Engine:
    settings, stored = settings_for(args), args.size * 8 // 7
    torch.manual_seed(0)
    batches = Synthetic(
        torch.randint(256, (IMAGES, 3, stored, stored), dtype=torch.uint8, device=device),
        torch.randint(1000, (args.examples,)),
        batch_size=args.batch,
        pad=0,
        flip=True,
        seed=0,
        device=device,
        views=partial(BoxView.resized, size=args.size, frame=(stored, stored)),
    )
    shape = (3, stored, stored)
    method = atas.methods.create(
        "atas", settings.threat, args.examples, shape, pad=0, device=device, **settings.method.settings
    )
    model = atas.models.create(args.model, 1000).to(device)
    if args.engine == "eager" or device.type != "cuda":
        return Engine(settings, model, method, batches)
    from atas.training.cuda_graph_engine import CudaGraphEngine

    return CudaGraphEngine(settings, model, method, batches)


def timed(engine: Engine, steps: int, device: torch.device) -> list[float]:
    """Return the seconds per step in ten rounds."""
    seconds, count = [], max(1, steps // 10)
    for _ in range(max(1, steps // count)):
        began = time.perf_counter()
        for _ in range(count):
            engine.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append((time.perf_counter() - began) / count)
    return seconds


def changed(method: PersistentPerturbation, index: Tensor, device: torch.device) -> float:
    """Return the share of these examples whose row differs from its initial noise.

    The noise is encoded on the device again, because a division may round differently on the host.
    """
    memory = method.memory
    draw = CounterRNG(method.seed, torch.tensor(0, device=device), index.to(device))
    initial = memory.encode(memory.threat.sample(draw, memory.delta.shape[1:], reset=True)).cpu()
    rows = memory.state_dict()["delta"][index.to(memory.delta.device)].cpu()
    return float((rows != initial).flatten(1).any(1).float().mean())


def measure(args: argparse.Namespace) -> dict[str, Any]:
    device = select_device(args.device)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, args.gigabytes * 1e9 / total))
    began = time.perf_counter()
    engine = make_engine(args, device)
    engine.prepare()
    start_up = time.perf_counter() - began
    method = engine.method
    assert isinstance(method, PersistentPerturbation)
    steps = min(args.steps // 2, len(engine.loader) // 2)
    first = len(engine.loader) - steps
    engine.start_epoch(0, first)
    seconds = timed(engine, steps, device)
    engine.start_epoch(1, 0)
    seconds += timed(engine, steps, device)
    orders = [engine.loader.order(0)[first * args.batch :], engine.loader.order(1)[: steps * args.batch]]
    trained = torch.cat(orders).unique()
    others = torch.ones(args.examples, dtype=torch.bool)
    others[trained] = False
    rest = others.nonzero()[:, 0]
    median = statistics.median(seconds)
    return {
        "examples": args.examples,
        "memory_gigabytes": method.memory.nbytes / 1e9,
        "device_gigabytes": torch.cuda.max_memory_reserved(device) / 1e9 if device.type == "cuda" else None,
        "cap_gigabytes": args.gigabytes,
        "engine": engine.kind,
        "start_up_seconds": start_up,
        "steps": 2 * steps,
        "ms_a_step": 1e3 * median,
        "low": 1e3 * min(seconds),
        "high": 1e3 * max(seconds),
        "images_a_second": args.batch / median,
        "in_both_epochs": len(torch.cat(orders)) - len(trained),
        "changed_of_trained": changed(method, trained[:2000], device),
        "changed_of_others": changed(method, rest[:2000], device) if len(rest) else 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=1_281_167)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--size", type=int, default=224, help="side of the views in pixels")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400, help="half at the end of an epoch, half after it")
    parser.add_argument("--grid", type=int, default=32)
    parser.add_argument("--dtype", default="int8", choices=["int8", "float16"])
    parser.add_argument("--store", default="host", choices=["host", "device"])
    parser.add_argument("--gigabytes", type=float, default=16.0, help="memory limit of the allocator on the device")
    parser.add_argument("--engine", default="auto", choices=["auto", "eager", "captured"])
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = measure(args)
    for key, value in result.items():
        print(f"{key:20} {value:,.2f}" if isinstance(value, float) else f"{key:20} {value}")
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        chosen = {key: value for key, value in vars(args).items() if key != "json"}
        document = {
            "environment": environment.environment_info(select_device(args.device)),
            "settings": chosen,
            **result,
        }
        write_text(args.json, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
