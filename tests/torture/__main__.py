"""Run the fault suite and print how many cases ended how."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from atas._utils.system import available_cpus
from torture import kills, machines, misuse, mutations, pairs, values
from torture.corpus import Corpus
from torture.harness import GOOD, OUTCOMES, Case

Part = Callable[[Corpus, Path, int, int], Iterator[Case]]
PARTS: dict[str, tuple[Part, int]] = {
    "kills": (kills.run, 200),
    "mutations": (mutations.run, 1000),
    "values": (values.run, 300),
    "misuse": (misuse.run, 300),
    "machines": (machines.run, 60),
    "pairs": (pairs.run, 42),
}


def run(folder: Path, only: list[str], scale: float, seed: int, jobs: int = 1) -> list[Case]:
    """Run parts of the suite, `jobs` at a time; `scale` is a share of the cases."""
    torch.set_num_threads(1)
    _import_everything()
    corpus = Corpus(folder / "corpus")
    with ProcessPoolExecutor(jobs, get_context("fork")) as pool:
        parts = [pool.submit(_run_part, name, corpus, folder / name, scale, seed) for name in only]
        return [case for part in parts for case in part.result()]


def _run_part(name: str, corpus: Corpus, folder: Path, scale: float, seed: int) -> list[Case]:
    part, count = PARTS[name]
    cases, began = [], time.monotonic()
    for case in part(corpus, folder, max(1, round(count * scale)), seed):
        cases.append(case)
        if case.outcome not in GOOD:
            print(f"{case.part}: {case.name}: {case.outcome}: {case.detail}", flush=True)
        if len(cases) % 50 == 0:
            print(f"{name}: {len(cases)} cases, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return cases


def _import_everything() -> None:
    """Import what the cases need, so that their processes start with it."""
    import pkgutil
    from importlib import import_module

    import atas

    for module in pkgutil.walk_packages(atas.__path__, "atas."):
        if "triton" not in module.name and not module.name.endswith("__main__"):
            import_module(module.name)


def table(cases: list[Case]) -> str:
    """Return the number of cases by part and outcome."""
    counts = Counter((case.part, case.outcome) for case in cases)
    lines = [f"{'':12}" + "".join(f"{outcome:>15}" for outcome in OUTCOMES)]
    for part in dict.fromkeys(case.part for case in cases):
        lines.append(f"{part:12}" + "".join(f"{counts[part, outcome]:>15}" for outcome in OUTCOMES))
    return "\n".join(lines)


def main() -> None:
    """Parse the command line, run the suite, and exit with 1 if a case is bad."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, comma-separated")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=available_cpus(), help="parts at a time")
    parser.add_argument("--out", type=Path, help="write all cases to this JSON file")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="atas-torture-") as folder:
        cases = run(Path(folder), arguments.only.split(","), arguments.scale, arguments.seed, arguments.jobs)
    print(f"\n{table(cases)}\n{len(cases)} cases, seed {arguments.seed}, {(time.monotonic() - began) / 60:.1f} min")
    if arguments.out:
        arguments.out.write_text(json.dumps([vars(case) for case in cases], indent=1) + "\n")
    sys.exit(any(case.outcome not in GOOD for case in cases))


if __name__ == "__main__":
    main()
