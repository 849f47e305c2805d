"""`atas evaluate`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from atas._utils.console import import_torch, print_json, print_line, print_table
from atas._utils.files import check_output_path
from atas.errors import UsageError

if TYPE_CHECKING:
    import torch

    from atas.cli.target import Target
    from atas.evaluation import Evaluation, EvaluationWarning
    from atas.training import Run


OutputFormat = Literal["table", "json", "nothing"]


@dataclass(frozen=True)
class EvaluateOptions:
    """What the command was given, as it was given."""

    weights: Path | None = None
    model: str | None = None
    data: str | None = None
    root: str | None = None
    size: int | None = None
    norm: str | None = None
    eps: str | None = None
    mean: str | None = None
    std: str | None = None
    examples: int | None = None
    out: Path | None = None
    attacks: str | None = None

    def attacks_or_default(self, default: tuple[str, ...]) -> tuple[str, ...]:
        """The attacks that were asked for, or the usual ones."""
        return default if self.attacks is None else tuple(name.strip() for name in self.attacks.split(","))

    def validate(self, run: Path | None) -> None:
        """An error where something is missing or does not go together; nothing is loaded for that."""
        if self.out is not None:
            check_output_path(self.out, "--out", ".json")
        if run is not None:
            for name in ("weights", "model", "data", "mean", "std", "size"):
                if getattr(self, name) is not None:
                    raise UsageError(
                        f"--{name} does not go with the folder of a run, which has its own; leave one of them out"
                    )
            return
        if self.weights is None and self.model is None:
            raise UsageError(
                "give the folder of a run, or --weights FILE or --model package.module:function, with --data"
            )
        if self.data is None or self.eps is None:
            missing = "--data (cifar10, ...)" if self.data is None else "--eps (8/255, ...)"
            raise UsageError(
                f"{missing} is missing; without a run's folder the command needs a model, data and a budget"
            )
        if self.weights is None and self.model is not None and ":" not in self.model:
            raise UsageError(f"a fresh '{self.model}' knows nothing: give its weights with --weights FILE.safetensors")


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
    options = EvaluateOptions(weights, model, data, root, size, norm, eps, mean, std, examples, out, attacks)
    options.validate(run)

    import_torch()
    from atas.cli.target import from_model, from_run
    from atas.training import Run

    evaluate_target(
        from_model(options) if run is None else from_run(Run.load(run), options),
        batch_size=batch_size,
        step_size=step_size,
        precision=precision,
        device=device,
        seed=seed,
        show="json" if as_json else "table",
    )


def evaluate_run(run: Run, *, quiet: bool = False) -> Evaluation:
    """Evaluate a run as its recipe says; with `quiet`, without a word on standard output."""
    from atas.cli.target import from_run

    return evaluate_target(from_run(run, EvaluateOptions()), show="nothing" if quiet else "table")


def evaluate_target(
    target: Target,
    *,
    batch_size: int | None = None,
    step_size: str | None = None,
    precision: str = "auto",
    device: str = "auto",
    seed: int = 0,
    show: OutputFormat = "table",
) -> Evaluation:
    """Evaluate with progress on the screen, and write the result."""
    from atas._utils.files import check_writable
    from atas.distributed.world import init
    from atas.evaluation import evaluate as run_evaluation
    from atas.evaluation.progress import EvaluationProgress
    from atas.recipes.values import parse_value

    path = target.out
    check_writable(path)
    progress = path.with_name(f"{path.stem}.progress.json")
    with init() as process, EvaluationProgress(quiet=process.rank > 0) as display, _explain_resume(progress):
        result = run_evaluation(
            target.model.to(_device(device, process.size)),
            target.test.images,
            target.test.labels,
            target.threat,
            attacks=target.attacks,
            batch_size=batch_size or target.batch_size,
            step_size=None if step_size is None else parse_value(step_size, float, "--step-size"),
            seed=seed,
            precision=precision,
            progress=display,
            progress_file=progress,
            shard=process.size > 1,
        )
    if process.rank == 0:
        notes = [] if target.expected is None or step_size is not None else target.expected.compare(result)
        _write(result, path, notes, show=show, shown=display.shown_warnings)
    return result


@contextmanager
def _explain_resume(progress: Path) -> Iterator[None]:
    """Say so where a person stops an evaluation that has something to go on from."""
    from atas.errors import AtasError

    try:
        yield
    except KeyboardInterrupt:
        if not progress.exists():
            raise
        raise AtasError(f"interrupted; the same command goes on from {progress}") from None


def _write(
    result: Evaluation, path: Path, notes: list[str], *, show: OutputFormat, shown: set[EvaluationWarning]
) -> None:
    """Show the result and write it: figures that took long are neither lost to a full disk nor to a reader who left."""
    from atas._utils.files import write_text

    page = path.with_suffix(".md")
    try:
        _show(result, show, shown)
    finally:
        write_text(page, result.markdown())
        result.save(path)  # last: it ends the progress
    if show == "table":
        for note in notes:
            print_line(note)
        print_line(f"written: {page}")
        print_line(f"written: {path}")


def _show(result: Evaluation, show: OutputFormat, shown: set[EvaluationWarning]) -> None:
    if show == "json":
        print_json(json.dumps(result.to_json(), indent=2))
    elif show == "table":
        print_table(result.table())
        for warning in result.warnings:
            if warning not in shown:
                print_line(f"warning: {warning}")
        print_line(result.sentence())


def _device(name: str, processes: int) -> torch.device:
    """Of several processes, each has a GPU of its own."""
    import torch

    from atas.training.engine import select_device

    device = select_device(name)
    if device.type == "cuda" and device.index is None and processes > 1:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return device
