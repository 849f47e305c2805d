"""Loading speed of training images: decoded from files, from packed JPEG shards, and from packed pixels.

    python benchmarks/data.py                                    # on noise images of 500 x 375 pixels
    python benchmarks/data.py --folder imagenette --size 256 --workers 1 2 4 8 --json results.json

Batches are copied to the device as for a training step. Rounds over all kinds are interleaved, and the median counts.
New files are in the page cache, so this measures processors and memory, not disks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from atas import data
from atas._utils import environment
from atas.data.streaming import StreamingLoader
from atas.distributed.world import select_device


def make_photos(root: Path, count: int) -> Path:
    """Write smooth noise, whose JPEG files are about as large as real photos."""
    random = np.random.default_rng(0)
    for half, number in (("train", count), ("test", 1)):
        folder = root / half / "noise"
        folder.mkdir(parents=True)
        for image in range(number):
            coarse = Image.fromarray(random.integers(0, 256, (75, 100, 3), np.uint8))
            coarse.resize((500, 375), Image.Resampling.BICUBIC).save(folder / f"{image:05}.jpg", quality=92)
    return root


def loaders(folder: Path, work: Path, args: argparse.Namespace, device: torch.device) -> dict[str, StreamingLoader]:
    sets = {"files": data.load("imagefolder", folder, size=args.size, lazy=True)}
    for kind in ("jpeg", "raw"):
        data.pack(folder, work / kind, size=args.size, format=kind)
        sets[f"packed {kind}"] = data.load("packed", work / kind)
    how = {"batch_size": args.batch, "pad": 4, "flip": True, "seed": 0, "device": device}
    return {
        f"{name}, {workers} workers": StreamingLoader(
            dataset.train.images, dataset.train.labels, workers=workers, **how
        )
        for name, dataset in sets.items()
        for workers in args.workers
    }


def epoch(loader: StreamingLoader, number: int, device: torch.device) -> float:
    """Return the images per second over an epoch."""
    order = loader.order(number)
    began = time.perf_counter()
    loader.start_epoch(order, 0)
    for batch in range(len(loader)):
        loader.prefetch(batch)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return len(loader.labels) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a folder with train/<class>/ and test/<class>/")
    parser.add_argument("--photos", type=int, default=1024, help="how many to make where no folder is given")
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = select_device(args.device)
    with tempfile.TemporaryDirectory() as work:
        folder = args.folder or make_photos(Path(work) / "photos", args.photos)
        made = loaders(folder, Path(work), args, device)
        for loader in made.values():
            epoch(loader, 0, device)
        speeds: dict[str, list[float]] = {name: [] for name in made}
        for number in range(args.rounds):
            for name, loader in made.items():
                speeds[name].append(epoch(loader, number + 1, device))
        examples = len(next(iter(made.values())).labels)
        for loader in made.values():
            loader.close()
    rows = {}
    print(f"{'source':28} {'images/s':>10} {'GB/s of pixels':>15}   spread over rounds")
    for name, values in speeds.items():
        median = statistics.median(values)
        rows[name] = {"images_per_second": median, "low": min(values), "high": max(values)}
        print(
            f"{name:28} {median:10.0f} {median * 3 * args.size**2 / 1e9:15.2f}   {min(values):.0f} to {max(values):.0f}"
        )
    if args.json is not None:
        settings = {"images": examples, "size": args.size, "batch": args.batch, "rounds": args.rounds}
        about = settings | {"folder": "generated" if args.folder is None else args.folder.name}
        args.json.write_text(
            json.dumps(about | {"rows": rows, "environment": environment.environment_info(device)}, indent=2)
        )


if __name__ == "__main__":
    main()
