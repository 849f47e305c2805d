"""`atas evaluate`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from atas.cli._options import Options
from atas.cli._say import echo, load_torch, say
from atas.cli._say import show as show_table

if TYPE_CHECKING:
    import torch

    from atas.cli._subject import Subject
    from atas.evaluation import Evaluation
    from atas.training import Run

Shown = Literal["table", "json", "nothing"]


def evaluate(
    run: Path | None = typer.Argument(None, help="The folder of a finished run; or --weights and --model."),
    attacks: str | None = typer.Option(None, "--attacks", help="Such as pgd10,autoattack; the run's, or pgd10,pgd50."),
    weights: Path | None = typer.Option(None, "--weights", help="A safetensors file, instead of a run."),
    model: str | None = typer.Option(None, "--model", help="Its model, or package.module:function."),
    data: str | None = typer.Option(None, "--data", help="The data set, without a run."),
    root: str | None = typer.Option(None, "--root", help="The data's folder, where it is not that of the training."),
    size: int | None = typer.Option(None, "--size", min=1, help="Side of the images of an image folder."),
    norm: str | None = typer.Option(None, "--norm", help="linf or l2; the run's, or linf."),
    eps: str | None = typer.Option(None, "--eps", help="The budget, such as 8/255; the run's by default."),
    mean: str | None = typer.Option(None, "--mean", help="Of the model's normalisation; comma-separated."),
    std: str | None = typer.Option(None, "--std", help="Of the model's normalisation; comma-separated."),
    examples: int | None = typer.Option(None, "--examples", min=1, help="Only the first so many test images."),
    batch_size: int | None = typer.Option(None, "--batch-size", min=1, help="Images at a time; changes no verdict."),
    step_size: str | None = typer.Option(None, "--step-size", help="Of PGD, such as 2/255; eps/5 by default."),
    precision: str = typer.Option("auto", "--precision", help="Of the search: auto or float32; verdicts are float32."),
    device: str = typer.Option("auto", "--device", help="auto, cpu or cuda."),
    seed: int = typer.Option(0, "--seed", help="Of the random starts."),
    out: Path | None = typer.Option(None, "--out", help="The result's file; Markdown goes beside it."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
) -> None:
    """Evaluate a model on a test set; verdicts are in float32.

    Writes evaluation.json and evaluation.md into the run's folder, or beside the weights; an earlier result on more
    images, by AutoAttack, or on the run's own images stays, and the new one goes beside it. After a stop, the same
    command goes on where it was. Under torchrun, processes share the images.

    \b
    Example: atas evaluate runs/cifar10-preact-resnet18-atas --attacks pgd10,pgd50x5,autoattack
             atas evaluate --weights net.safetensors --model resnet18 --data cifar10 --eps 8/255
             atas evaluate --model my_package.networks:trained --data cifar10 --eps 0.5 --norm l2
             torchrun --nproc-per-node 8 -m atas evaluate runs/mine --attacks autoattack
    """
    options = Options(weights, model, data, root, size, norm, eps, mean, std, examples, out, attacks)
    options.check(run)

    load_torch()
    from atas.cli._subject import of_model, of_run
    from atas.training import Run

    evaluate_subject(
        of_model(options) if run is None else of_run(Run.load(run), options),
        batch_size=batch_size,
        step_size=step_size,
        precision=precision,
        device=device,
        seed=seed,
        show="json" if as_json else "table",
    )


def evaluate_run(run: Run, *, quiet: bool = False) -> Evaluation:
    """Evaluate a run as its recipe says; with `quiet`, without a word on standard output."""
    from atas.cli._subject import of_run

    return evaluate_subject(of_run(run, Options()), show="nothing" if quiet else "table")


def evaluate_subject(
    subject: Subject,
    *,
    batch_size: int | None = None,
    step_size: str | None = None,
    precision: str = "auto",
    device: str = "auto",
    seed: int = 0,
    show: Shown = "table",
) -> Evaluation:
    """Evaluate with progress on the screen, and write the result."""
    from atas._files import make_ready
    from atas.cli._watch import Watch
    from atas.evaluation import evaluate as run_evaluation
    from atas.processes import launched
    from atas.training.values import convert

    path = subject.out
    make_ready(path)
    progress = path.with_name(f"{path.stem}.progress.json")
    with launched() as process, Watch(quiet=process.rank > 0) as watch, _can_go_on(progress):
        result = run_evaluation(
            subject.model.to(_device(device, process.count)),
            subject.test.images,
            subject.test.labels,
            subject.threat,
            attacks=subject.attacks,
            batch_size=batch_size or subject.batch_size,
            step_size=None if step_size is None else convert(step_size, float, "--step-size"),
            seed=seed,
            precision=precision,
            progress=watch,
            progress_file=progress,
            shard=process.count > 1,
        )
    if process.rank == 0:
        notes = [] if subject.expected is None or step_size is not None else subject.expected.beside(result)
        _write(result, path, notes, show=show, said=watch.said)
    return result


@contextmanager
def _can_go_on(progress: Path) -> Iterator[None]:
    """Say so where a person stops an evaluation that has something to go on from."""
    from atas.errors import AtasError

    try:
        yield
    except KeyboardInterrupt:
        if not progress.exists():
            raise
        raise AtasError(f"interrupted; the same command goes on from {progress}") from None


def _write(result: Evaluation, path: Path, notes: list[str], *, show: Shown, said: set[str]) -> None:
    """Show the result and write it: figures that took long are neither lost to a full disk nor to a reader who left."""
    from atas._files import write_text

    page = path.with_suffix(".md")
    try:
        _show(result, show, said)
    finally:
        write_text(page, result.markdown())
        result.save(path)  # last: it ends the progress
    if show == "table":
        for note in notes:
            say(note)
        say(f"written: {page}")
        say(f"written: {path}")


def _show(result: Evaluation, show: Shown, said: set[str]) -> None:
    if show == "json":
        echo(json.dumps(result.to_json(), indent=2))
    elif show == "table":
        show_table(result.table())
        for caution in result.warnings:
            if f"warning: {caution}" not in said:
                say(f"warning: {caution}")
        say(result.sentence())


def _device(name: str, processes: int) -> torch.device:
    """Of several processes, each has a GPU of its own."""
    import torch

    from atas.training.engine import choose_device

    device = choose_device(name)
    if device.type == "cuda" and device.index is None and processes > 1:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return device
