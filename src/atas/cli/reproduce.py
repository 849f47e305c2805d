"""`atas reproduce`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from atas._utils.console import import_torch, print_line, print_table
from atas.cli import options
from atas.cli.options import complete_studies, integer_parser, parse_list
from atas.errors import UsageError
from atas.paper import catalogue

if TYPE_CHECKING:
    from atas.paper.study import Study, StudyOptions, StudyResult


def reproduce(
    names: list[str] = typer.Argument(
        None, metavar="STUDY...", help="Names of studies; see --list.", autocompletion=complete_studies
    ),
    list_all: bool = typer.Option(False, "--list", help="List the studies."),
    quick: bool = typer.Option(False, "--quick", help="On the embedded digits, cut short: minutes on a CPU."),
    out: Path = typer.Option(Path("runs/reproduce"), "--out", help="The results' folder; studies may share one."),
    methods: str | None = typer.Option(None, "--methods", help="Only these; comma-separated, such as atas,atta."),
    networks: str | None = typer.Option(None, "--networks", help="Only these, such as preact-resnet18."),
    eps: str | None = typer.Option(None, "--eps", help="Only these budgets, such as 8/255,12/255."),
    seeds: str | None = typer.Option(None, "--seeds", help="Of the trainings, such as 0,1,2; 0 by default."),
    attacks: str | None = typer.Option(None, "--attacks", help="Instead of the study's own, such as pgd10,pgd50."),
    padding: str | None = typer.Option(None, "--padding", help="Of test images, such as 0,4; 4 is as released."),
    examples: int | None = typer.Option(None, "--examples", min=1, help="Only the first so many test images."),
    root: str | None = typer.Option(None, "--root", help="The data's folder."),
    assignments: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help="Override a key of all recipes."),
    reuse: list[Path] = typer.Option([], "--reuse", help="Take finished runs from this folder too; may be repeated."),
    no_run: bool = typer.Option(False, "--no-run", help="Train and evaluate nothing; show what there is."),
    no_pictures: bool = typer.Option(False, "--no-pictures", help="Draw none; the same command without it does later."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Only say what would be run."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
) -> None:
    """Reproduce tables and figures of the paper, ours beside theirs.

    A study is a plan of runs. It can be stopped at any moment; the same command goes on, and finished runs are used
    again, by other studies too. Several studies make one plan, in which a training that more than one of them needs is
    done once; each heeds the options that it takes. The same command started once for each GPU
    (CUDA_VISIBLE_DEVICES=0, 1, ...) shares the work. The exit status is 1 if a run failed.

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
        catalogue.study_module(name)  # a wrong name shows before torch is loaded

    import_torch()
    from atas.paper.studies import get
    from atas.paper.study import StudyOptions, TrainingStudy, run_studies
    from atas.recipes.values import parse_value
    from atas.sweeps import PlanProgress

    chosen = list(map(get, names))
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
    for study in chosen if dry_run or no_run else ():
        if not isinstance(study, TrainingStudy):
            raise UsageError(
                f"the study {study.name} is no plan of runs; leave out {'--dry-run' if dry_run else '--no-run'}"
            )
    if dry_run:
        _tell(chosen, request, as_json=as_json)
        return
    reports = run_studies(chosen, request, PlanProgress())
    if as_json:
        typer.echo(_json(names, reports))
    else:
        for report in reports:
            print_line(report.page)
            for path in report.files:
                print_line(f"written: {path}")
    failures = list(dict.fromkeys(failure for report in reports for failure in report.failures))
    if failures:
        typer.echo(f"atas: {_failed(failures)}", err=True)
        raise typer.Exit(1)


def _json(names: list[str], reports: list[StudyResult]) -> str:
    """The result of a study as it was written; of several, by name."""
    texts = [next(p for p in report.files if p.suffix == ".json").read_text(encoding="utf-8") for report in reports]
    if len(texts) == 1:
        return texts[0]
    return json.dumps({name: json.loads(text) for name, text in zip(names, texts, strict=True)}, indent=1)


def _failed(failures: list[str]) -> str:
    some = f"{len(failures)} runs" if len(failures) > 1 else "1 run"
    return f"{some} failed, the first was {failures[0]}; the same command tries again"


def _list(*, as_json: bool) -> None:
    from rich import box
    from rich.table import Table

    from atas.paper.studies import get, names

    rows = [{"study": name, "what": get(name).about} for name in names()]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table("study", "what", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for row in rows:
        table.add_row(*row.values())
    print_table(table)


def _tell(studies: list[Study], request: StudyOptions, *, as_json: bool) -> None:
    """What a plan would do."""
    from atas.paper.study import make_plan

    plan = make_plan(studies, request)
    left = {trial.key for trial in plan.remaining()}
    if as_json:
        rows = [
            {"trial": trial.label, "attacks": list(trial.attacks), "done": trial.key not in left}
            for trial in plan.trials
        ]
        typer.echo(json.dumps(rows, indent=2))
        return
    for trial in plan.trials:
        print_line(f"{'to do' if trial.key in left else 'done '}  {trial.label}: {', '.join(trial.attacks)}")
    print_line(f"{len(left)} of {len(plan.trials)} runs to do, into {request.out}")
