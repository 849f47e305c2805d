"""Choose the learning rate of a larger batch on held-out training images, and record every rate.

    python benchmarks/large_batch.py --batch 512 --rates 0.2 0.3 0.4 --out results/speed/large-batch.json
    python benchmarks/large_batch.py --batch 512 --rates 0.2:0.1:1e-3 --out results/speed/large-batch.json  # added

A rate is a peak, optionally followed by colons with the factor at each milestone (0.1) and the weight decay (5e-4).
Every training holds out the same 5,000 training images; the rate with the best PGD-10 accuracy on them is chosen. The
test set is not used.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from atas._utils.files import write_text
from atas.sweeps import PlanProgress
from atas.sweeps.plan import Plan
from atas.sweeps.store import Store
from atas.sweeps.trial import Trial

KEYS = "peak", "factor", "weight_decay"
RECIPE, HELD_OUT, ATTACK = "cifar10-preact-resnet18-atas", 5000, "pgd10"


def main() -> None:
    """Train and measure with every peak and seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rates", nargs="+", required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/large-batch"), help="folder of the trainings")
    parser.add_argument("--out", type=Path, required=True)
    chosen = parser.parse_args()
    store, rows = Store(chosen.runs), json.loads(chosen.out.read_text())["runs"] if chosen.out.exists() else []
    for seed in chosen.seeds:
        for rate in chosen.rates:
            given = [float(part) for part in rate.split(":")]
            tried = {"factor": 0.1, "weight_decay": 5e-4} | dict(zip(KEYS, given, strict=False))
            values = {"training.batch_size": chosen.batch, "optimizer.weight_decay": tried["weight_decay"]}
            values |= {"schedule.peak": tried["peak"], "schedule.factor": tried["factor"]}
            trial = Trial(RECIPE, values, seed, attacks=(ATTACK,), held_out=HELD_OUT)
            Plan([trial], store).run(PlanProgress())
            record = store.record(trial)
            if record is None:
                raise SystemExit(f"{trial.label} failed; see the error file in {chosen.runs}/runs")
            accuracy = {name: record.attacks[name]["accuracy"] for name in ("clean", ATTACK)}
            environment = record.training["environment"]
            rows.append({**tried, "seed": seed, "accuracy": accuracy, "environment": environment})
            about = {"recipe": RECIPE, "batch_size": chosen.batch, "held_out": HELD_OUT, "runs": rows}
            chosen.out.parent.mkdir(parents=True, exist_ok=True)
            write_text(chosen.out, json.dumps(about, indent=1) + "\n")
            print(rate, seed, accuracy, flush=True)


if __name__ == "__main__":
    main()
