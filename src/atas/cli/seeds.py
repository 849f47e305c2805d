"""Several runs in one command: the seeds of `atas train --seeds`, and the folder of runs of `atas evaluate`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from atas import __version__, attacks
from atas._utils.console import print_json, print_line, print_table
from atas._utils.formatting import printable
from atas.cli.evaluate import EvaluateOptions, OutputFormat, evaluate_target, show_result
from atas.cli.target import Target, from_run
from atas.core.fingerprint import weights_hash
from atas.distributed.world import init
from atas.errors import AtasError, DataError, UsageError
from atas.evaluation import Evaluation
from atas.evaluation.inputs import data_hash
from atas.evaluation.seed_stats import stats_by_attack
from atas.threat import Masked
from atas.training import Run
from atas.training.run import RunFolder, find_runs, seed_folder, seed_runs
from atas.training.trainer import Interrupted

# What else is in the protocol of a result follows from these, or does not change it.
_PROTOCOL = {"attacks", "seed", "verdict", "precision", "search_precision", "tf32", "mode", "image_shape", "batch_size"}
_PROTOCOL |= {"search_notes", "processes", "checks_seconds"}


@dataclass(frozen=True)
class TrainingJob:
    """One training of the command. `label` stands before the lines of its progress."""

    folder: Path | None
    seed: int | None
    resume: bool
    label: str = ""

    @contextmanager
    def explain_stop(self) -> Iterator[None]:
        """Say how to continue if the user stops one of several trainings."""
        try:
            yield
        except (Interrupted, KeyboardInterrupt):
            if not self.label:
                raise
            sentence = f"stopped in {self.label}, into {self.folder}; continue with the same command and --resume"
            raise AtasError(sentence) from None


def plan_seeds(group: Path, seeds: Sequence[int], *, resume: bool, overwrite: bool) -> list[TrainingJob]:
    """Return one training for each seed; raise UsageError now if a later one could not start."""
    if RunFolder(group).recipe.exists():
        raise UsageError(f"{group} is the folder of one run, not of several seeds; choose another --out")
    if resume and overwrite:
        raise UsageError("--resume continues runs and --overwrite deletes them; leave one of them out")
    folders = [seed_folder(group, seed) for seed in seeds]
    begun = [folder for folder in folders if RunFolder(folder).recipe.exists()]
    if begun and not (resume or overwrite):
        raise UsageError(
            f"there is a run in {begun[0]} already; continue with --resume, start again with --overwrite, or choose "
            f"another folder with --out"
        )
    return [
        TrainingJob(folder, seed, resume and folder in begun, f"seed {number} of {len(seeds)}")
        for number, (folder, seed) in enumerate(zip(folders, seeds, strict=True), 1)
    ]


def runs_in(folder: Path) -> list[Path]:
    """Return the runs and groups of seeds that a folder holds, a group as itself; empty for the folder of a run."""
    found = find_runs([folder])
    return [] if found == [folder] and not seed_runs(folder) else found


def evaluate_runs(entries: Sequence[Path], options: EvaluateOptions, *, as_json: bool) -> None:
    """Evaluate each run, and print the statistics of each group of seeds. A run that has this result is not evaluated
    again."""
    groups = {entry: seed_runs(entry) or [entry] for entry in entries}
    for folder in (folder for folders in groups.values() for folder in folders):
        if not RunFolder(folder).model.exists():
            Run.load(folder)  # raises the error that says how to finish it
    with init() as world:
        found: dict[Path, dict[str, Evaluation]] = {}
        for entry, folders in groups.items():
            results = found[entry] = {}
            for folder in folders:
                if world.is_main and not as_json:
                    print_line(f"{folder}:")
                target = from_run(Run.load(folder, trust=options.trust), options)
                results[folder.name] = evaluate_once(target, show="nothing" if as_json else "table")
            if len(folders) > 1 and world.is_main and not as_json:
                print_seed_table(f"{entry}, {len(folders)} seeds", list(results.values()))
    if as_json and world.is_main:
        print_json(json.dumps({str(entry): group_to_json(results) for entry, results in found.items()}, indent=2))


def evaluate_once(target: Target, *, show: OutputFormat) -> Evaluation:
    """Return the earlier result of a target if it answers the same question, else evaluate."""
    with init() as world:
        earlier = world.on_rank0(lambda: _reusable_result(target))
        if earlier is None:
            return evaluate_target(target, show=show)
        if world.is_main and show == "table":
            show_result(earlier, show)
            print_line(f"evaluated already: {target.result_path()}")
        return earlier


def _reusable_result(target: Target) -> Evaluation | None:
    """Return the saved result of these weights under these attacks on these images; None if there is none.

    Only plain results are used again: without target classes, masks and corruptions.
    """
    restricted = target.target_class is not None or isinstance(target.threat, Masked)
    if restricted or target.options.corruptions is not None:
        return None
    try:
        earlier = Evaluation.load(target.result_path()) if target.result_path().exists() else None
    except DataError:
        return None
    if earlier is None or earlier.corruptions or not set(earlier.protocol) <= _PROTOCOL:
        return None
    names = "clean", *target.attacks
    settings = {name: attacks.create(name, target.step_size).settings(target.threat) for name in names}
    question = (target.threat, len(target.test.labels), target.options.seed, weights_hash(target.model), __version__)
    environment = earlier.environment.get("atas")
    same = question == (earlier.threat, earlier.n, earlier.protocol.get("seed"), earlier.weights, environment)
    if not same or earlier.protocol.get("attacks") != json.loads(json.dumps(settings)):
        return None
    return earlier if data_hash(target.test.images, target.test.labels) == earlier.data else None


def print_seed_table(title: str, results: Sequence[Evaluation]) -> None:
    """Print mean, range and standard deviation over seeds for each attack."""
    table = Table(title=Text(printable(title)), box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("attack", "mean %", "range over seeds", "sd", "seeds"):
        table.add_column(heading, justify="left" if heading == "attack" else "right")
    for name, stats in stats_by_attack(results).items():
        spread = "-" if stats.deviation is None else f"{stats.deviation:.2f}"
        ends = f"{stats.low:.2f} to {stats.high:.2f}" if stats.runs > 1 else "-"
        table.add_row(Text(printable(name)), f"{stats.value:.2f}", ends, spread, str(stats.runs))
    print_table(table)


def group_to_json(results: dict[str, Evaluation]) -> dict[str, Any]:
    """Return the results of runs by folder, and their statistics if there are several."""
    each = {"runs": {name: result.to_json() for name, result in results.items()}}
    if len(results) < 2:
        return each
    return {"over_seeds": {name: s.to_shares() for name, s in stats_by_attack(list(results.values())).items()}} | each
