"""`atas demo`: why adversarial training, why AutoAttack, and what this package does, in about a minute on two cores."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from atas._utils.console import ProgressDisplay, import_torch, print_json, print_line, print_table
from atas._utils.formatting import shell_quote
from atas.errors import AtasError

if TYPE_CHECKING:
    from rich.table import Table

    from atas.report.summary import RunSummary

_DATA = "8 x 8 digits"
_EPS = 0.2
_EPOCHS = 40
IMAGES = 100
ATTACKS = ("fgsm", "pgd50", "autoattack")
_RATES = {"clean": "clean", "pgd10": "PGD-10"}
_POLL_SECONDS = 0.5
_STANDARD = (f"method.eps={_EPS}", f"training.epochs={_EPOCHS}")  # what the recipe of atas-plus has
VALUES = {"standard": _STANDARD, "fgsm": (*_STANDARD, "method.step_size=2 eps"), "atas-plus": ()}
_TITLES = {"standard": "no attack", "fgsm": "one step of 2 eps", "atas-plus": "adaptive steps"}
_LONGEST_FIRST = ("atas-plus", "fgsm", "standard")  # so that two processes end at about the same time


def demo(
    out: Path = typer.Option(Path("runs/demo"), "--out", help="Folder of the runs; earlier ones are replaced."),
    seed: int = typer.Option(0, "--seed", help="Seed of the trainings."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON at the end; progress goes to standard error."),
) -> None:
    """See a robust model, and a collapse, in a minute.

    Trains one network in three ways on embedded 8 x 8 digits, attacks all three with AutoAttack, and compares them. Two
    processes share the work, with one thread each.

    \b
    Example: atas demo
    """
    from rich.console import Console

    out.mkdir(parents=True, exist_ok=True)  # so that a wrong path fails before the training
    jobs = {method: _Job(method, out / method, seed) for method in VALUES}
    display = ProgressDisplay(Console(stderr=as_json))
    display.log(f"Training one small network on {_DATA} in three ways, then attacking it: every pixel by up to {_EPS}.")
    _run(jobs, display)
    import_torch()
    from atas import report

    folders = [job.folder for job in jobs.values()]
    runs = dict(zip(jobs, report.summarise(folders), strict=True))
    page = out / "report.html"
    report.write_page(folders, page)
    if as_json:
        print_json(json.dumps({"runs": [run.to_json() for run in runs.values()], "report": str(page)}, indent=2))
        return
    print_table(_table(runs))
    for sentence in _sentences(runs):
        print_line(sentence, wrap=True)
    print_line(f"report: {page}")
    print_line(
        f"next: atas report {shell_quote(out / 'atas-plus')}, docs/tutorial.md, and your own images: docs/own.md"
    )


@dataclass
class _Job:
    """The training and the evaluation of one network, in processes of their own."""

    method: str
    folder: Path
    seed: int
    phase: str = "waiting"
    stopped: bool = False
    process: subprocess.Popen[str] | None = field(default=None, repr=False)

    def run(self) -> None:
        """Train, then evaluate."""
        values = [part for assignment in VALUES[self.method] for part in ("--set", assignment)]
        recipe = f"digits-small-cnn-{self.method}"
        self._call("training", "train", recipe, "--out", self.folder, "--overwrite", "--seed", self.seed, *values)
        self._call("attacking", "evaluate", self.folder, "--attacks", ",".join(ATTACKS), "--examples", IMAGES)
        self.phase = "done"

    def _call(self, phase: str, *arguments: object) -> None:
        if self.stopped:
            return
        self.phase = phase
        command = [sys.executable, "-m", "atas", *map(str, arguments)]
        one_thread = os.environ | {"OMP_NUM_THREADS": "1"}  # so small a network gains little from more
        with subprocess.Popen(
            command,
            env=one_thread,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as self.process:
            _, errors = self.process.communicate()
        if self.process.returncode and not self.stopped:
            reason = (errors.strip().splitlines() or [f"exit status {self.process.returncode}"])[-1]
            raise AtasError(f"the demo stopped while {phase} {self.method}: {reason.removeprefix('atas: ')}")

    def stop(self) -> None:
        """Ask the process to save and stop."""
        self.stopped = True
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)


def _run(jobs: dict[str, _Job], display: ProgressDisplay) -> None:
    """Run all jobs, two at a time, and show where they are."""
    display.add_bar()
    with display, ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        futures = [pool.submit(jobs[method].run) for method in _LONGEST_FIRST]
        try:
            phases: dict[str, str] = {}
            while not all(future.done() for future in futures):
                for job in jobs.values():
                    _show(display, job, phases.get(job.method))
                    phases[job.method] = job.phase
                if any(future.done() and future.exception() for future in futures):
                    break
                time.sleep(_POLL_SECONDS)
            for future in futures:
                if future.done():
                    future.result()
        except KeyboardInterrupt:
            raise AtasError("interrupted; the next `atas demo` starts again") from None
        finally:  # after Ctrl-C, or when one has failed
            for job in jobs.values():
                job.stop()
    for future in futures:
        future.result()


def _show(display: ProgressDisplay, job: _Job, shown: str | None) -> None:
    """Show the last epoch of a training; without a terminal, print a line when the phase changes."""
    row = _last_epoch(job)
    epochs = row["epoch"] + 1 if row else 0
    text = job.phase
    if row and job.phase == "training":
        rates = "  ".join(f"{name} {100 * row[key]:.0f}%" for key, name in _RATES.items())
        text = f"epoch {epochs}/{_EPOCHS}  {rates}"
    plain = f"{job.method}: {job.phase}" if job.phase not in (shown, "waiting") else ""
    display.show(f"{job.method:<9}", plain, total=_EPOCHS, completed=epochs, text=text)


def _last_epoch(job: _Job) -> dict[str, Any]:
    """Return the last row of the metrics; empty before the first epoch has ended."""
    if job.phase == "waiting":  # the folder may hold an earlier run
        return {}
    from atas.training.metrics import completed_epochs, read_metrics

    return next(iter(reversed(completed_epochs(read_metrics(job.folder / "metrics.jsonl")))), {})


def _table(runs: dict[str, RunSummary]) -> Table:
    """Return the accuracies of all networks on the same images."""
    from rich import box
    from rich.table import Table

    table = Table("training", "attack in training", "clean %", "FGSM %", "PGD-50 %", "AutoAttack %", box=box.SIMPLE)
    for method, run in runs.items():
        accuracy = _accuracy(run)
        table.add_row(method, _TITLES[method], *(f"{100 * accuracy[name]:.0f}" for name in ("clean", *ATTACKS)))
    return table


def _accuracy(run: RunSummary) -> dict[str, float]:
    assert run.evaluation is not None
    return run.evaluation.accuracy


def _sentences(runs: dict[str, RunSummary]) -> list[str]:
    """Return what the table shows, from its figures."""
    standard, single, plus = (_accuracy(runs[method]) for method in ("standard", "fgsm", "atas-plus"))
    result, collapse = runs["atas-plus"].evaluation, runs["fgsm"].collapse_epoch
    assert result is not None
    low, high = (f"{100 * end:.0f}" for end in result.interval["autoattack"])
    end = f"collapsed in epoch {collapse}: it keeps" if collapse is not None else "did not collapse this time: it keeps"
    return [
        f"1. Standard training is right on {_percent(standard['clean'])} of the clean digits and on "
        f"{_percent(standard['autoattack'])} under attack.",
        f"2. Training with one step that is too large looks robust under one step, {_percent(single['fgsm'])}, but it "
        f"{end} {_percent(single['autoattack'])} under AutoAttack.",
        f"3. atas-plus keeps {_percent(plus['autoattack'])} under AutoAttack (95% interval {low} to "
        f"{high}%, {result.n} images), for one more forward and backward pass in each training step.",
        "4. Weak attacks overestimate robustness: judge a model by AutoAttack. A collapse is reported during the "
        "training.",
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"
