"""`atas train`."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from atas._utils.console import import_torch, print_json
from atas._utils.formatting import shell_quote
from atas.cli import options
from atas.cli.options import complete_recipes
from atas.errors import UsageError
from atas.recipes import loading


def train(
    recipe: str | None = typer.Argument(
        None, help="Name or path of a recipe; optional with --resume.", autocompletion=complete_recipes
    ),
    out: Path | None = typer.Option(None, "--out", help="Run folder; default: runs/<recipe>."),
    assignments: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help="Override a recipe key; repeatable."),
    seed: int | None = typer.Option(None, "--seed", help="Shorthand for --set training.seed=..."),
    resume: bool = typer.Option(False, "--resume", help="Resume the run in the folder."),
    overwrite: bool = typer.Option(
        False, "--overwrite", help="Start over; deletes the earlier run's weights, evaluations, report and exports."
    ),
    evaluate_after: bool = typer.Option(False, "--evaluate", help="Evaluate on the test set after training."),
    skip_damaged: bool = typer.Option(
        False, "--skip-damaged", help="Leave out images of a folder that cannot be decoded; the run lists them."
    ),
    trust: bool = options.TRUST,
    as_json: bool = typer.Option(False, "--json", help="Print JSON at the end; progress goes to standard error."),
) -> None:
    """Train a robust model from a recipe. Under torchrun, all processes train one model.

    --set overrides any recipe key; recipe.toml in a run folder lists all keys with their values.

    \b
    Example: atas train cifar10-preact-resnet18-atas --set training.epochs=10 --out runs/first
             torchrun --nproc-per-node 8 -m atas train cifar10-preact-resnet18-atas
    """
    values = options.parse_assignments(assignments) | ({"data.skip_damaged": True} if skip_damaged else {})
    if recipe is not None:
        loading.find(recipe)  # report a wrong name before importing torch
    elif not (resume and out is not None):
        raise UsageError("pass a recipe, or --resume and a run folder (--out); `atas ls recipes` lists recipes")

    import_torch()
    from rich.console import Console

    from atas.cli.evaluate import evaluate_run
    from atas.distributed.world import init
    from atas.training import TrainingProgress
    from atas.training import train as run_training

    with init() as processes:
        live = TrainingProgress(Console(stderr=as_json, quiet=not processes.is_main))
        run = run_training(
            recipe, out=out, values=values, seed=seed, resume=resume, overwrite=overwrite, live=live, trust=trust
        )
        evaluation = evaluate_run(run, quiet=as_json) if evaluate_after else None
    if not processes.is_main:
        return
    if as_json:
        result = None if evaluation is None else evaluation.to_json()
        summary = {"folder": str(run.folder), "recipe": run.recipe.name, "epochs": len(run.metrics)}
        print_json(json.dumps(summary | {"last_epoch": run.metrics[-1], "evaluation": result}, indent=2))
    elif not evaluate_after:
        live.log(f"done: {run.folder}; next: atas evaluate {shell_quote(run.folder)}{run.recipe.trust_option}")
