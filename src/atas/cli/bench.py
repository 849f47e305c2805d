"""`atas bench`."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from atas._utils.console import import_torch, print_json, print_table
from atas._utils.files import check_output_path, check_writable, write_text
from atas.cli import options
from atas.cli.completion import complete_recipes
from atas.recipes import loading


def bench(
    recipe: str = typer.Argument(help="Name or path of a recipe.", autocompletion=complete_recipes),
    assignments: list[str] = options.SET,
    steps: int = typer.Option(20, "--steps", min=1, help="Steps in each of the five timed rounds."),
    out: Path | None = typer.Option(None, "--out", help="Also write the JSON to this file."),
    quiet: bool = options.QUIET,
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
) -> None:
    """Time a recipe's training step on this machine.

    Compares it with a plain eager loop and with the speed of a large matrix product, and shows whether data loading or
    compute is the bottleneck. Packed data is read as in training, image folders only
    with --set data.loading=streaming; otherwise images are random.

    \b
    Example: atas bench cifar10-preact-resnet18-atas --steps 100
    """
    values = options.parse_assignments(assignments)
    if out is not None:
        check_output_path(out, "--out", ".json")
    loading.find(recipe)  # report a wrong name before importing torch

    import_torch(quiet=quiet)
    from rich.console import Console

    from atas import recipes as known
    from atas.training import TrainingProgress
    from atas.training.bench import bench as run_bench

    settings = known.load(recipe).with_values(values)
    if out is not None:
        check_writable(out)
    result = run_bench(settings, steps, TrainingProgress(Console(stderr=True, quiet=quiet)))
    text = json.dumps(result.to_json(), indent=1)
    if out is not None:
        write_text(out, text + "\n")
    if as_json:
        print_json(text)
    else:
        _show(result)


def _show(result) -> None:  # type: ignore[no-untyped-def]
    from rich import box
    from rich.table import Table

    step, eager = result.step, result.eager
    stages = ", ".join(f"{name} {100 * share:.0f}%" for name, share in result.stages.items())
    rows = {
        "recipe": f"{result.recipe}, batch {result.batch_size}, on {result.environment['device']}",
        "step": f"{step.median:.2f} ms ({step.low:.2f} to {step.high:.2f}), {result.engine} engine, n = {step.steps}",
        "data alone": f"{result.data.median:.2f} ms per batch; the bottleneck is {result.limit}",
        "epoch": f"{result.epoch_seconds:.2f} s; whole training {result.training_seconds:.0f} s",
        "start-up": f"{result.start_up_seconds:.1f} s",
        "plain eager loop": f"{eager.median:.2f} ms per step ({eager.median / step.median:.2f}x)",
        "stages of an eager step": stages,
        "arithmetic": f"{result.flop / 1e9:.1f} GFLOP per step, {result.achieved / 1e12:.2f} TFLOP/s; a large matrix "
        f"product has {result.ceiling / 1e12:.2f} ({100 * result.achieved / result.ceiling:.0f}%)",
        "peak memory": f"{result.peak_memory / 2**20:,.0f} MiB",
    }
    table = Table(box=box.SIMPLE, show_header=False)
    for name, value in rows.items():
        table.add_row(name, value)
    print_table(table)
