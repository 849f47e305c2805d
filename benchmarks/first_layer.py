"""How far YOPO moves the filters of the first layer if their gradient counts once, or twice as in its authors' code.

    python benchmarks/first_layer.py --json results/yopo-first-layer.json

It trains a small pre-activation network on the embedded digits, on the CPU, with the learning rate and momentum of
YOPO on CIFAR-10. Before BatchNorm only the direction of a filter counts, so moves are relative to its norm.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import atas
from atas._utils import environment
from atas.models.preact_resnet import PreActBlock

_WIDTH = 16
_EPS = 0.15


class Small(nn.Module):
    """A stem and three blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, _WIDTH, 3, padding=1, bias=False)
        widths = [(_WIDTH, _WIDTH, 1), (_WIDTH, 2 * _WIDTH, 2), (2 * _WIDTH, 4 * _WIDTH, 2)]
        self.blocks = nn.Sequential(*(PreActBlock(*width) for width in widths))
        self.bn, self.fc = nn.BatchNorm2d(4 * _WIDTH), nn.Linear(4 * _WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of pixels in [0, 1]."""
        return self.fc(F.relu(self.bn(self.blocks(self.conv1((x - 0.3) / 0.35)))).mean((2, 3)))


def course(twice: bool, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(seed)
    train = atas.data.load("digits").train
    images, labels = torch.as_tensor(train.images[:]).float() / 255, train.labels.long()
    model = Small()
    method = atas.methods.create(
        "yopo", atas.Linf(_EPS), len(labels), (1, 8, 8), pad=0, seed=seed, step_size=_EPS / 4, first_layer_twice=twice
    )
    optimizer = torch.optim.SGD(model.parameters(), args.rate, momentum=0.9, weight_decay=5e-4)
    moves, right = [], []
    for step in range(args.steps):
        method.start_epoch(step * args.batch // len(labels))
        index = torch.randint(len(labels), (args.batch,))
        old = model.conv1.weight.detach().flatten(1).clone()
        made = method.step(model, optimizer, images[index], labels[index], index)
        moves.append((model.conv1.weight.detach().flatten(1) - old).norm(dim=1) / old.norm(dim=1))
        right.append(float((made.logits.argmax(1) == labels[index]).float().mean()))
    late = torch.stack(moves[args.steps // 4 :])  # skips the first quarter, in which norms still settle
    norms = model.conv1.weight.detach().flatten(1).norm(dim=1)
    return {
        "twice": twice,
        "seed": seed,
        "median_norm": float(norms.median()),
        "median_move": float(late.median()),
        "largest_move": float(late.max()),
        "right_at_the_end": sum(right[-20:]) / 20,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rate", type=float, default=0.04)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    settings = {"steps": args.steps, "batch": args.batch, "rate": args.rate, "eps": _EPS, "width": _WIDTH}
    rows = []
    for seed in args.seeds:
        for twice in (False, True):
            rows.append(course(twice, seed, args))
            print(rows[-1], flush=True)
            if args.json:
                document = {
                    "environment": environment.environment_info(torch.device("cpu")),
                    "settings": settings,
                    "runs": rows,
                }
                args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
