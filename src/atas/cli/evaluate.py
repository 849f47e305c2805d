"""`atas evaluate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from atas.cli._say import say
from atas.cli._say import show as show_table

if TYPE_CHECKING:
    from atas.training import Run


def evaluate(
    run: Path = typer.Argument(help="The folder of a finished run."),
    attacks: str | None = typer.Option(None, "--attacks", help="Comma-separated, such as fgsm,pgd10,pgd50x10."),
    examples: int | None = typer.Option(None, "--examples", min=1, help="Only the first so many test images."),
    batch_size: int | None = typer.Option(None, "--batch-size", min=1, help="Images at a time; changes no verdict."),
    step_size: str | None = typer.Option(None, "--step-size", help="Of PGD, such as 2/255; eps/5 by default."),
    device: str = typer.Option("auto", "--device", help="auto, cpu or cuda."),
    seed: int = typer.Option(0, "--seed", help="Of the random starts."),
    root: str | None = typer.Option(None, "--root", help="The data's folder, where it is not that of the training."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
) -> None:
    """Evaluate a run on its test set, in float32, and write evaluation.json into its folder.

    \b
    Example: atas evaluate runs/cifar10-preact-resnet18-atas --attacks pgd10,pgd50x5
    """
    from atas.training import Run

    evaluate_run(
        Run.load(run),
        attacks=None if attacks is None else [name.strip() for name in attacks.split(",")],
        examples=examples,
        batch_size=batch_size,
        step_size=step_size,
        device=device,
        seed=seed,
        root=root,
        as_json=as_json,
    )


def evaluate_run(
    run: Run,
    *,
    attacks: list[str] | None = None,
    examples: int | None = None,
    batch_size: int | None = None,
    step_size: str | None = None,
    device: str = "auto",
    seed: int = 0,
    root: str | None = None,
    as_json: bool = False,
) -> None:
    """Evaluate with progress on the screen; what is not given comes from the run's recipe."""
    from rich.console import Console
    from rich.progress import Progress

    from atas.evaluation import evaluate as run_evaluation
    from atas.training.engine import choose_device
    from atas.training.run import Folder, load_data
    from atas.training.values import convert

    wanted = run.recipe.evaluation
    split = load_data(run.recipe, root).test
    count = examples or wanted.examples or len(split)
    console = Console()
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bars: dict[str, object] = {}

        def show(attack: str, done: int, total: int) -> None:
            if attack not in bars:
                bars[attack] = progress.add_task(attack, total=total)
            progress.update(bars[attack], completed=done)  # type: ignore[arg-type]

        result = run_evaluation(
            run.model.to(choose_device(device)),
            split.images[:count],
            split.labels[:count],
            run.recipe.threat,
            attacks=tuple(attacks or wanted.attacks),
            batch_size=batch_size or wanted.batch_size,
            step_size=None if step_size is None else convert(step_size, float, "--step-size"),
            seed=seed,
            progress=show,
        )
    path = _where(Folder(run.folder).evaluation, result.n)
    result.save(path)
    if as_json:
        typer.echo(json.dumps(result.to_json(), indent=2))
    else:
        show_table(result.table())
        say(f"written: {path}")


def _where(path: Path, n: int) -> Path:
    """The run's evaluation, unless one on more images is there: that one stays, and this goes beside it."""
    from atas._files import read_json

    earlier = read_json(path).get("n", 0)
    return path if n >= earlier else path.with_name(f"{path.stem}-{n}.json")
