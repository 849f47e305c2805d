"""The gradient norms of ATAS on small data, beside the c that `c="auto"` chooses for its budget and size.

    OMP_NUM_THREADS=1 python benchmarks/gradient_norms.py results/gradient-norms.json

Trains the small CNN on the digits, as they are (8 x 8) and enlarged (16 x 16), for 20 epochs each, and saves quantiles
of the norms that ATAS remembers and of its last steps.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import atas
from atas._utils.environment import environment_info
from atas._utils.files import write_text

_SEED, _EPOCHS, _BATCH, _RATE = 0, 20, 64, 0.1
_SHARES = (0.05, 0.5, 0.95)
_ROWS = ((atas.Linf(0.05), 1), (atas.Linf(0.1), 1), (atas.L2(0.5), 1), (atas.Linf(0.1), 2))  # threat, enlargement


def quantiles(values: torch.Tensor) -> list[float]:
    """Return the quantiles at `_SHARES`, rounded."""
    return [round(value, 4) for value in values.quantile(torch.tensor(_SHARES)).tolist()]


def measure(threat: atas.threat.Threat, enlargement: int) -> dict[str, Any]:
    """Train by ATAS with c="auto", and return the norms that it ends with."""
    train = atas.data.load("digits").train
    x, y = torch.as_tensor(train.images).float() / 255, torch.as_tensor(train.labels).long()
    x = F.interpolate(x, scale_factor=enlargement, mode="nearest")
    torch.manual_seed(_SEED)
    model = atas.models.create("small-cnn", num_classes=10, channels=1)
    method = atas.ATAS(threat, len(x), tuple(x.shape[1:]), c="auto", seed=_SEED)
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE, momentum=0.9, weight_decay=5e-4)
    steps = _EPOCHS * -(-len(x) // _BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps)
    for epoch in range(_EPOCHS):
        method.start_epoch(epoch, _EPOCHS)
        for index in torch.randperm(len(x)).split(_BATCH):
            images, view = atas.random_view(x[index], pad=4)
            method.step(model, optimizer, images, y[index], index, view)
            schedule.step()
    return {
        "threat": repr(threat),
        "shape": list(method.shape),
        "gradient_norm": quantiles(method.gradient_norms),
        "step_in_eps": quantiles(method.step_sizes / threat.eps),
        "auto_c": round(method.c, 4),
    }


def main() -> None:
    """Measure all rows, print them, and save them."""
    rows = []
    for threat, enlargement in _ROWS:
        rows.append(measure(threat, enlargement))
        print(rows[-1], flush=True)
    setting = {"seed": _SEED, "epochs": _EPOCHS, "batch_size": _BATCH, "quantiles": _SHARES}
    content = {"setting": setting, "rows": rows, "environment": environment_info(torch.device("cpu"))}
    write_text(Path(sys.argv[1]), json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
