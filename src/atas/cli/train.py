"""`atas train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from atas._utils.console import import_torch, print_json
from atas._utils.formatting import shell_quote
from atas.cli import options
from atas.cli.auto import AutoOptions, train_auto
from atas.cli.completion import complete_recipes
from atas.cli.options import integer_parser, parse_list
from atas.errors import UsageError
from atas.recipes import loading

if TYPE_CHECKING:
    from atas.evaluation import Evaluation
    from atas.recipes import Recipe


class Trained(NamedTuple):
    """A finished run without its model, of which several would fill the memory."""

    folder: Path
    recipe: Recipe
    metrics: list[dict[str, Any]]
    evaluation: Evaluation | None


def train(
    recipe: str | None = typer.Argument(
        None, help="Name or path of a recipe; optional with --resume or --auto.", autocompletion=complete_recipes
    ),
    auto: str | None = typer.Option(
        None, "--auto", metavar="DATA", help="Folder or data set to train on and evaluate, with settings chosen for it."
    ),
    minutes: float | None = typer.Option(None, "--minutes", help="With --auto: the time for everything; default: 10."),
    eps: str | None = typer.Option(None, "--eps", help="With --auto: budget of the attacks; default: 8/255."),
    out: Path | None = typer.Option(None, "--out", help="Run folder; default: runs/<recipe>."),
    assignments: list[str] = options.SET,
    seed: int | None = typer.Option(None, "--seed", help="Shorthand for --set training.seed=..."),
    seeds: str | None = typer.Option(
        None, "--seeds", help="Train one run for each seed, such as 0,1,2, into seed-0, seed-1, ... in the run folder."
    ),
    resume: bool = typer.Option(False, "--resume", help="Resume the run in the folder."),
    overwrite: bool = typer.Option(
        False, "--overwrite", help="Start over; deletes the earlier run's weights, evaluations, report and exports."
    ),
    evaluate_after: bool = typer.Option(False, "--evaluate", help="Evaluate on the test set after training."),
    skip_damaged: bool = typer.Option(
        False, "--skip-damaged", help="Leave out images of a folder that cannot be decoded; the run lists them."
    ),
    trust: bool = options.TRUST,
    quiet: bool = options.QUIET,
    as_json: bool = typer.Option(False, "--json", help="Print JSON at the end; progress goes to standard error."),
) -> None:
    """Train a robust model from a recipe. Under torchrun, all processes train one model.

    --set overrides any recipe key; recipe.toml in a run folder lists all keys with their values. --auto needs no
    recipe: it chooses settings from the images and the time, trains, evaluates, and says what the model withstands.

    \b
    Example: atas train cifar10-preact-resnet18-atas --set training.epochs=10 --out runs/first
             atas train --auto photos --minutes 10 --eps 4/255
             atas train cifar10-preact-resnet18-atas --seeds 0,1,2 --evaluate --out runs/atas
             torchrun --nproc-per-node 8 -m atas train cifar10-preact-resnet18-atas
    """
    values = options.parse_assignments(assignments) | ({"data.skip_damaged": True} if skip_damaged else {})
    given = AutoOptions(auto, minutes, eps)
    given.validate({"a recipe": recipe, "--resume": resume, "--seeds": seeds, "--evaluate": evaluate_after})
    if auto is not None:
        import_torch(quiet=quiet)
        train_auto(given, out=out, seed=seed, values=values, overwrite=overwrite, as_json=as_json, quiet=quiet)
        return
    numbers = parse_list("seeds", seeds, integer_parser("--seeds"))
    if recipe is not None:
        loading.find(recipe)  # report a wrong name before importing torch
    elif not (resume and out is not None):
        raise UsageError(
            "pass a recipe, --auto DATA, or --resume and a run folder (--out); `atas ls recipes` lists recipes"
        )
    if numbers is not None:
        _check_seeds(recipe, seed, values)

    import_torch(quiet=quiet)
    from rich.console import Console

    from atas import recipes
    from atas.cli.evaluate import evaluate_run
    from atas.cli.seeds import TrainingJob, plan_seeds
    from atas.distributed.world import init
    from atas.training import TrainingProgress
    from atas.training import train as run_training
    from atas.training.job import default_folder

    with init() as world:
        jobs = [TrainingJob(out, seed, resume)]
        if recipe is not None and numbers is not None:
            out = out or default_folder(recipes.load(recipe).name)
            group = out
            jobs = world.on_rank0(lambda: plan_seeds(group, numbers, resume=resume, overwrite=overwrite))
        trained = []
        for job in jobs:
            live = TrainingProgress(Console(stderr=as_json, quiet=quiet or not world.is_main), label=job.label)
            with job.explain_stop():
                run = run_training(
                    recipe,
                    out=job.folder,
                    values=values,
                    seed=job.seed,
                    resume=job.resume,
                    overwrite=overwrite,
                    live=live,
                    trust=trust,
                )
                evaluation = evaluate_run(run, show=not as_json, quiet=quiet, reuse=resume) if evaluate_after else None
            trained.append(Trained(run.folder, run.recipe, run.metrics, evaluation))
    if not world.is_main:
        return
    if as_json:
        print_json(json.dumps(_to_json(trained, out if numbers else None), indent=2))
    else:
        _show(trained, out if numbers else None)


def _check_seeds(recipe: str | None, seed: int | None, values: dict[str, Any]) -> None:
    """Raise an error if other arguments contradict --seeds."""
    if recipe is None:
        raise UsageError("--seeds needs the recipe too; continue with the same command and --resume")
    if seed is not None or "training.seed" in values:
        raise UsageError("--seeds gives every run its seed; leave out --seed and --set training.seed")


def _to_json(trained: list[Trained], group: Path | None) -> dict[str, Any]:
    """Return what was trained: one run, or the runs of a group with their statistics."""
    from atas.evaluation.seed_stats import stats_by_attack

    runs = [
        {
            "folder": str(run.folder),
            "recipe": run.recipe.name,
            "epochs": len(run.metrics),
            "last_epoch": run.metrics[-1],
            "evaluation": None if run.evaluation is None else run.evaluation.to_json(),
        }
        for run in trained
    ]
    if group is None:
        return runs[0]
    stats = stats_by_attack([run.evaluation for run in trained if run.evaluation is not None])
    over_seeds = {name: values.to_shares() for name, values in stats.items()}
    seeds = [{"seed": run.recipe.training.seed, **row} for run, row in zip(trained, runs, strict=True)]
    return {"folder": str(group), "recipe": trained[0].recipe.name, "over_seeds": over_seeds or None, "runs": seeds}


def _show(trained: list[Trained], group: Path | None) -> None:
    """Print where the runs are and what to do next; after evaluations of several seeds, their statistics."""
    from rich.console import Console

    from atas.cli.seeds import print_seed_table
    from atas.training import TrainingProgress

    evaluations = [run.evaluation for run in trained if run.evaluation is not None]
    if group is not None and evaluations:
        print_seed_table(f"{group}, {len(evaluations)} seeds", evaluations)
    elif not evaluations:
        folder = group or trained[0].folder
        collapses = [line for run in trained if (line := _collapse(run, group))]
        done = "; ".join([f"done: {folder}", *collapses])
        last = f"{done}; next: atas evaluate {shell_quote(folder)}{trained[0].recipe.trust_option}"
        TrainingProgress(Console()).log(last, wrap=False)  # which outlives a closed pipe


def _collapse(run: Trained, group: Path | None) -> str | None:
    """Say in which epoch a run collapsed; None if it did not."""
    from atas.training.metrics import first_collapse

    epoch = first_collapse(run.metrics)
    name = "" if group is None else f"{run.folder.name} "
    return None if epoch is None else f"{name}collapsed in epoch {epoch}"
