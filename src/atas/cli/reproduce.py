"""`atas reproduce`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from atas._utils.console import import_torch, print_json, print_line, print_page, print_table
from atas._utils.formatting import printable
from atas.cli import options
from atas.cli.completion import complete_assignments, complete_attacks, complete_studies
from atas.cli.options import integer_parser, parse_list
from atas.errors import UsageError
from atas.paper import catalogue

if TYPE_CHECKING:
    from atas.paper.study import Study, StudyOptions, StudyResult


def reproduce(
    names: list[str] = typer.Argument(
        None, metavar="STUDY...", help="Studies; see --list.", autocompletion=complete_studies
    ),
    list_all: bool = typer.Option(False, "--list", help="List the studies."),
    quick: bool = typer.Option(False, "--quick", help="Short runs on the built-in digits: minutes on a CPU."),
    out: Path = typer.Option(Path("runs/reproduce"), "--out", help="Output folder; studies may share one."),
    methods: str | None = typer.Option(
        None, "--methods", help="Only these methods, comma-separated, such as atas,atta."
    ),
    networks: str | None = typer.Option(None, "--networks", help="Only these networks, such as preact-resnet18."),
    eps: str | None = typer.Option(None, "--eps", help="Only these budgets, such as 8/255,12/255."),
    seeds: str | None = typer.Option(None, "--seeds", help="Training seeds, such as 0,1,2; default: 0."),
    attacks: str | None = typer.Option(
        None,
        "--attacks",
        help="Attacks instead of the study's, such as pgd10,pgd50.",
        autocompletion=complete_attacks,
    ),
    padding: str | None = typer.Option(
        None, "--padding", help="Padding of test images, such as 0,4; 4 is as released."
    ),
    examples: int | None = typer.Option(None, "--examples", min=1, help="Evaluate only the first N test images."),
    root: str | None = typer.Option(None, "--root", help="Data directory."),
    assignments: list[str] = typer.Option(
        [],
        "--set",
        metavar="KEY=VALUE",
        help="Override a key of all recipes; repeatable.",
        autocompletion=complete_assignments,
    ),
    reuse: list[Path] = typer.Option([], "--reuse", help="Also use finished runs from this folder; repeatable."),
    no_run: bool = typer.Option(False, "--no-run", help="Train and evaluate nothing; report existing results."),
    no_pictures: bool = typer.Option(
        False, "--no-pictures", help="Skip pictures; run again without this option to draw them."
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Only list the runs."),
    quiet: bool = options.QUIET,
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
) -> None:
    """Reproduce tables and figures of the paper.

    Prints our results beside the published ones. A study is a plan of runs. If interrupted, the same command resumes;
    finished runs are reused, also by other studies. Several studies form one plan that trains each shared model once;
    an option applies to the studies that have it. To use several GPUs, start the same command once for each
    (CUDA_VISIBLE_DEVICES=0, 1, ...). The exit status is 1 if a run failed.

    \b
    Example: atas reproduce table-cifar10 --quick
             atas reproduce table-cifar10 --networks preact-resnet18 --eps 8/255 --seeds 0,1,2 --out results/cifar10
             atas reproduce table-cifar10 --methods atas --padding 0,4
             atas reproduce figure-step-size figure-loss-surface --root data --no-pictures
    """
    if list_all:
        _list(as_json=as_json)
        return
    if not names:
        raise UsageError("name a study, such as table-cifar10; `atas reproduce --list` shows them")
    names = list(dict.fromkeys(names))
    values = options.parse_assignments(assignments) | ({} if root is None else {"data.root": root})
    for name in names:
        catalogue.study_module(name)  # report a wrong name before importing torch

    import_torch(quiet=quiet)
    from rich.console import Console

    from atas.paper.studies import get
    from atas.paper.study import StudyOptions, TrainingStudy, run_studies
    from atas.recipes.values import parse_value
    from atas.sweeps import PlanProgress

    selected = list(map(get, names))
    request = StudyOptions(
        out=out,
        quick=quick,
        methods=parse_list("methods", methods, str),
        networks=parse_list("networks", networks, str),
        eps=parse_list("eps", eps, lambda text: parse_value(text, float, "--eps")),
        seeds=parse_list("seeds", seeds, integer_parser("--seeds")),
        attacks=parse_list("attacks", attacks, str),
        padding=parse_list("padding", padding, integer_parser("--padding")),
        examples=examples,
        values=values,
        reuse=tuple(reuse),
        runs=not no_run,
        pictures=not no_pictures,
    )
    for study in selected if dry_run or no_run else ():
        if not isinstance(study, TrainingStudy):
            raise UsageError(
                f"the study {study.name} trains no models; leave out {'--dry-run' if dry_run else '--no-run'}"
            )
    if dry_run:
        _show_plan(selected, request, as_json=as_json)
        return
    reports = run_studies(selected, request, PlanProgress(Console(stderr=True, quiet=quiet)))
    if as_json:
        print_json(_json(names, reports))
    else:
        for report in reports:
            print_page(report.page)
            for path in report.files:
                print_line(f"written: {path}")
    failures = list(dict.fromkeys(failure for report in reports for failure in report.failures))
    if failures:
        typer.echo(f"atas: {printable(_failed(failures))}", err=True)
        raise typer.Exit(1)


def _json(names: list[str], reports: list[StudyResult]) -> str:
    """Return the JSON of one study as written, or of several studies by name."""
    texts = [next(p for p in report.files if p.suffix == ".json").read_text(encoding="utf-8") for report in reports]
    if len(texts) == 1:
        return texts[0]
    return json.dumps({name: json.loads(text) for name, text in zip(names, texts, strict=True)}, indent=1)


def _failed(failures: list[str]) -> str:
    count = f"{len(failures)} runs" if len(failures) > 1 else "1 run"
    return f"{count} failed, the first was {failures[0]}; run the same command to try again"


def _list(*, as_json: bool) -> None:
    from rich import box
    from rich.table import Table

    from atas.paper.studies import get, names

    rows = [{"study": name, "what": get(name).about} for name in names()]
    if as_json:
        print_json(json.dumps(rows, indent=2))
        return
    table = Table("study", "what", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(*row.values())
    print_table(table)


def _show_plan(studies: list[Study], request: StudyOptions, *, as_json: bool) -> None:
    """Print the runs of a plan."""
    from atas.paper.study import make_plan

    plan = make_plan(studies, request)
    left = {trial.key for trial in plan.remaining()}
    if as_json:
        rows = [
            {"trial": trial.label, "attacks": list(trial.attacks), "done": trial.key not in left}
            for trial in plan.trials
        ]
        print_json(json.dumps(rows, indent=2))
        return
    for trial in plan.trials:
        print_line(f"{'to do' if trial.key in left else 'done '}  {trial.label}: {', '.join(trial.attacks)}")
    print_line(f"{len(left)} of {len(plan.trials)} runs to do, into {request.out}")
