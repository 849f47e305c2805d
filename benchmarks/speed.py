"""Time whole trainings on real data, evaluate their models, and write both to results/speed.

    python benchmarks/speed.py run atas atas-float32 --seeds 0 1 2    # one JSON file per case, one row per seed
    python benchmarks/speed.py run atas --keep runs/reproduce         # keep the models for `atas reproduce`
    python benchmarks/speed.py table                                  # the table in docs/performance.md

The training time covers steps, resets, permutations, schedule and short batches, with the device synchronised at both
ends. The wall time also covers compilation, monitor and checkpoints.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "speed"
MARKS = "<!-- speed: made by benchmarks/speed.py table -->", "<!-- end of speed -->"

PREACT, WIDE = "cifar10-preact-resnet18", "cifar10-wrn-28-10"
# Name in the table, recipe, and overridden values.
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "atas": ("PreActResNet-18, ATAS, batch 128, bf16", f"{PREACT}-atas", {}),
    "atas-float32": ("the same in float32", f"{PREACT}-atas", {"engine.precision": "float32"}),
    "atas-512": (
        "the same, batch 512, rate x 2",
        f"{PREACT}-atas",
        {"training.batch_size": 512, "schedule.peak": 0.2},
    ),
    "atas-512-decay": (
        "the same, batch 512, rate x 1.4, weight decay x 2",
        f"{PREACT}-atas",
        {"training.batch_size": 512, "schedule.peak": 0.14, "optimizer.weight_decay": 1e-3},
    ),
    "atas-384": (
        "the same, batch 384, rate x 2",
        f"{PREACT}-atas",
        {"training.batch_size": 384, "schedule.peak": 0.2},
    ),
    "atas-deterministic": ("the same, deterministic", f"{PREACT}-atas", {"engine.deterministic": True}),
    "standard": ("PreActResNet-18, standard training", f"{PREACT}-standard", {}),
    "wrn-atas": ("WRN-28-10, ATAS, batch 128, bf16", f"{WIDE}-atas", {}),
}


def main() -> None:
    """Run cases, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("cases", nargs="+", choices=CASES)
    run.add_argument("--seeds", nargs="+", type=int, default=[0])
    run.add_argument("--epochs", type=int, help="fewer than the recipe's, for timing without an evaluation")
    run.add_argument("--out", type=Path, default=RESULTS)
    run.add_argument("--keep", type=Path, help="keep the trainings in this folder, for `atas reproduce --out`")
    commands.add_parser("table")
    chosen = parser.parse_args()
    if chosen.command == "table":
        write_table()
        return
    for seed in chosen.seeds:
        for case in chosen.cases:
            keep(chosen.out / f"{case}.json", case, measure(case, seed, chosen.epochs, chosen.keep))


def measure(case: str, seed: int, epochs: int | None, keep_in: Path | None) -> dict[str, Any]:
    """Train and evaluate once."""
    import atas
    from atas._utils import environment
    from atas.sweeps.store import Store
    from atas.sweeps.trial import Trial
    from atas.training import TrainingProgress

    class Watch(TrainingProgress):
        """Record when the first step can begin."""

        ready = 0.0

        def start(self, *args: Any) -> None:
            self.ready = self.ready or time.perf_counter()
            super().start(*args)

    _, recipe, values = CASES[case]
    data = atas.data.load("cifar10")
    live = Watch(quiet=True)
    with TemporaryDirectory() as folder:
        began = time.perf_counter()
        values = values | ({} if epochs is None else {"training.epochs": epochs})
        out = Store(keep_in or Path(folder)).training_folder(Trial(recipe, values, seed)).path
        run = atas.train(recipe, out=out, seed=seed, values=values, live=live, overwrite=True)
        wall = time.perf_counter() - began
    row = {
        "seed": seed,
        "epochs": run.recipe.training.epochs,
        "train_seconds": run.metrics[-1]["seconds"],
        "wall_seconds": wall,
        "start_up_seconds": live.ready - began,
        "environment": environment.environment_info(next(run.model.parameters()).device),
    }
    if epochs is None:
        began = time.perf_counter()
        result = atas.evaluate(run.model, data.test, threat=run.recipe.threat, attacks=("pgd10", "pgd50"))
        row |= {
            "evaluation_seconds": time.perf_counter() - began,
            "examples": result.n,
            "accuracy": result.accuracy,
            "interval": result.interval,
            "protocol": result.protocol,
        }
    print(case, {key: value for key, value in row.items() if key not in ("environment", "protocol")}, flush=True)
    return row


def keep(path: Path, case: str, row: dict[str, Any]) -> None:
    """Write a row to the file of a case; it replaces an earlier row of the same seed and length."""
    label, recipe, values = CASES[case]
    rows = json.loads(path.read_text())["runs"] if path.exists() else []
    rows = [old for old in rows if (old["seed"], old["epochs"]) != (row["seed"], row["epochs"])] + [row]
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"case": label, "recipe": recipe, "values": values, "runs": rows}
    path.write_text(json.dumps(document, indent=1) + "\n")


def write_table() -> None:
    """Replace the table on the page of performance."""
    lines = [
        "| 30 epochs of CIFAR-10 on one H200 | training | all of `atas train` | clean | PGD-10 | PGD-50 | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in CASES:
        if (path := RESULTS / f"{case}.json").exists():
            lines.append(line(json.loads(path.read_text())))
    page = ROOT / "docs" / "performance.md"
    text = page.read_text()
    start, end = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
    page.write_text(text[:start] + "\n" + "\n".join(lines) + "\n" + text[end:])


def line(document: dict[str, Any]) -> str:
    """Return a case as a row of the table: means, with the range over seeds in brackets."""
    full = [row for row in document["runs"] if "accuracy" in row]
    rows = full or document["runs"]
    epochs = rows[0]["epochs"]
    scale = 1 if full else 30 / epochs
    timed = [row for row in rows if "note" not in row]  # a note says that other jobs ran beside it
    note = "" if full else f" (from {epochs} epochs)"
    seconds = spread([row["train_seconds"] * scale for row in timed], "{:.1f}") + f" s{note}" if timed else "-"
    wall = spread([row["wall_seconds"] for row in timed], "{:.0f}") + " s" if full and timed else "-"
    figures = [
        spread([100 * row["accuracy"][attack] for row in full], "{:.2f}") if full else "-"
        for attack in ("clean", "pgd10", "pgd50")
    ]
    return f"| {document['case']} | {seconds} | {wall} | {' | '.join(figures)} | {len(rows)} |"


def spread(values: list[float], form: str) -> str:
    """Return the mean and, for several values, the range."""
    mean = form.format(statistics.mean(values))
    return mean if len(values) == 1 else f"{mean} ({form.format(min(values))} to {form.format(max(values))})"


if __name__ == "__main__":
    main()
