"""How far the weights of a training on two processes are from those on one, on the CPU with gloo.

    python benchmarks/rank_agreement.py

Trains a network of two convolutions on 512 images of the digits in two shards, and prints the largest difference of a
weight after 1, 8 and 80 steps: the table in docs/distributed.md.
"""

from __future__ import annotations

import io
import os
import socket
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor, nn

import atas
from atas.training import TrainingProgress

BATCH = 64
NORMS = {"none": (False, False), "sync_batchnorm=true": (True, True), "own rows": (True, False)}
LENGTHS = ((BATCH, 1), (8 * BATCH, 1), (8 * BATCH, 10))  # images and epochs


class Net(nn.Module):
    """Two convolutions that compute in one dtype, whatever comes in."""

    def __init__(self, norm: bool, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, stride=2)
        self.norm1, self.norm2 = (nn.BatchNorm2d(width) if norm else nn.Identity() for width in (16, 32))
        self.fc, self.dtype = nn.Linear(32, 10), dtype
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        x = F.relu(self.norm1(self.conv1(x.to(self.dtype))))
        return self.fc(F.relu(self.norm2(self.conv2(x))).mean((2, 3)))


def train(rank: int, processes: int, port: int, method: str, net: Net, sync: bool, length: tuple[int, int], out: str):
    """Train as one of these processes."""
    torch.set_num_threads(1)
    if processes > 1:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        dist.init_process_group("gloo", rank=rank, world_size=processes)
    images, epochs = length
    digits = atas.data.load("digits")
    train, test = digits.train, digits.test
    classes = digits.train.classes
    data = atas.data.from_arrays(
        "part", train.images[:images], train.labels[:images], test.images[:32], test.labels[:32], classes
    )
    values = {
        "method.name": method, "training.epochs": epochs, "training.batch_size": BATCH, "training.probe": 32,
        "data.shards": 2, "engine.kind": "eager", "engine.device": "cpu", "engine.precision": "float32",
        "engine.sync_batchnorm": sync, "schedule.name": "piecewise", "schedule.peak": 0.1,
    }  # fmt: skip
    quiet = TrainingProgress(Console(quiet=True, file=io.StringIO()))
    atas.train("digits-small-cnn-atas", model=net, data=data, out=out, values=values, live=quiet)
    if processes > 1:
        dist.destroy_process_group()


def weights(processes: int, *settings: object) -> dict[str, Tensor]:
    """Return the weights that a training on this number of processes ends with."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        out = str(Path(folder, "run"))
        mp.start_processes(train, (processes, port, *settings, out), nprocs=processes, start_method="fork")
        return load_file(Path(out, "model.safetensors"))


def main() -> None:
    """Print a row for each method, kind of BatchNorm and dtype."""
    for method in ("standard", "atas"):
        for name, (norm, sync) in NORMS.items():
            for dtype in (torch.float64, torch.float32):
                row = []
                for length in LENGTHS:
                    one, two = (weights(count, method, Net(norm, dtype), sync, length) for count in (1, 2))
                    learned = [key for key, _ in Net(norm, dtype).named_parameters()]
                    row.append(max(float((one[key].double() - two[key].double()).abs().max()) for key in learned))
                print(f"{method:9} {name:20} {str(dtype)[6:]} {' '.join(f'{value:.0e}' for value in row)}", flush=True)


if __name__ == "__main__":
    main()
