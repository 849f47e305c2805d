"""`atas evaluate`."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from atas._utils.console import import_torch, print_json, print_line, print_table
from atas._utils.files import check_output_path, check_writable
from atas._utils.formatting import shell_quote
from atas.cli import options
from atas.cli.completion import complete_attacks, complete_corruptions
from atas.cli.options import parse_list
from atas.errors import UsageError

if TYPE_CHECKING:
    from atas.cli.target import Target
    from atas.distributed.world import World
    from atas.evaluation import Evaluation, EvaluationWarning
    from atas.training import Run


PERTURBED_IMAGES = (".npz", ".safetensors")  # endings of --keep
OutputFormat = Literal["table", "json", "nothing"]


@dataclass(frozen=True)
class EvaluateOptions:
    """The options of the command as given."""

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
    batch_size: int | None = None
    step_size: str | None = None
    precision: str = "auto"
    device: str = "auto"
    seed: int = 0
    out: Path | None = None
    attacks: str | None = None
    trust: bool = False
    quiet: bool = False
    target_class: str | None = None
    mask: Path | None = None
    keep: Path | None = None
    curve: str | None = None
    corruptions: str | None = None

    def attacks_or_default(self, default: tuple[str, ...]) -> tuple[str, ...]:
        """Return the requested attacks, or `default`."""
        return parse_list("attacks", self.attacks, str) or default

    def check_several_runs(self, folder: Path) -> None:
        """Raise UsageError if an option needs one run."""
        if self.out is not None:
            raise UsageError(
                f"--out names one file, and {folder} holds several runs; results are written to their folders"
            )
        self._refuse(
            ("target_class", "mask", "keep", "curve", "corruptions"),
            f"needs one run, and {folder} holds several; name one of them",
        )

    def validate(self, run: Path | None) -> None:
        """Raise an error if options are missing or conflict; loads nothing."""
        if self.out is not None:
            check_output_path(self.out, "--out", ".json")
        if self.curve is not None:
            self._refuse(
                ("eps", "target_class", "keep", "corruptions"),
                "cannot be combined with --curve; leave one of them out",
            )
        parse_list("corruptions", self.corruptions, str)
        if self.keep is not None:
            check_output_path(self.keep, "--keep", *PERTURBED_IMAGES)
        if run is not None:
            if run.is_file():
                raise UsageError(
                    f"{run} is a file, not a run folder; for a file of weights, pass --weights {shell_quote(run)} with "
                    f"--data and --eps"
                )
            if self.data is not None:
                raise UsageError(
                    f"--data cannot be combined with a run folder, which defines it; for other images of the same "
                    f"classes, pass --root {shell_quote(self.data)}"
                )
            self._refuse(
                ("weights", "model", "mean", "std", "size"),
                "cannot be combined with a run folder, which defines it; leave one of them out",
            )
            return
        if self.weights is None and self.model is None:
            raise UsageError("pass a run folder, or --weights FILE or --model package.module:function with --data")
        if self.data is None or (self.eps is None and self.curve is None):
            missing = "--data (cifar10, ...)" if self.data is None else "--eps (8/255, ...)"
            raise UsageError(f"{missing} is missing; without a run folder the command needs a model, data and a budget")
        if self.weights is None and self.model is not None and ":" not in self.model:
            raise UsageError(f"'{self.model}' is untrained; pass --weights FILE.safetensors")

    def _refuse(self, names: tuple[str, ...], reason: str) -> None:
        """Raise UsageError if one of these options was given."""
        for name in names:
            if getattr(self, name) is not None:
                raise UsageError(f"--{name.replace('_', '-')} {reason}")


def evaluate(
    run: Path | None = typer.Argument(
        None, help="Folder of a finished run, or of several runs, instead of --weights or --model."
    ),
    attacks: str | None = typer.Option(
        None,
        "--attacks",
        help="Comma-separated, such as pgd10,autoattack; default: the recipe's, else pgd10,pgd50.",
        autocompletion=complete_attacks,
    ),
    weights: Path | None = typer.Option(
        None, "--weights", help="Safetensors file, published model or hf:owner/name, instead of a run."
    ),
    model: str | None = typer.Option(None, "--model", help="Network of the weights, or package.module:function."),
    data: str | None = typer.Option(
        None, "--data", help="Data set, folder, .npz file or hf:owner/name, if not evaluating a run."
    ),
    root: str | None = typer.Option(None, "--root", help="Data directory, if different from training."),
    size: int | None = typer.Option(None, "--size", min=1, help="Side of the images in pixels, for images in files."),
    norm: str | None = typer.Option(None, "--norm", help="linf or l2; default: the run's, else linf."),
    eps: str | None = typer.Option(None, "--eps", help="Budget, such as 8/255; default: the run's."),
    mean: str | None = typer.Option(None, "--mean", help="Mean for normalisation, comma-separated."),
    std: str | None = typer.Option(None, "--std", help="Standard deviation for normalisation, comma-separated."),
    examples: int | None = typer.Option(None, "--examples", min=1, help="Evaluate only the first N test images."),
    batch_size: int | None = typer.Option(
        None, "--batch-size", min=1, help="Images per batch; does not change results."
    ),
    step_size: str | None = typer.Option(None, "--step-size", help="Step size of PGD, such as 2/255; default: eps/5."),
    precision: str = typer.Option(
        "auto", "--precision", help="Precision of the search, auto or float32; predictions use float32."
    ),
    device: str = typer.Option("auto", "--device", help="auto, cpu or cuda."),
    seed: int = typer.Option(0, "--seed", help="Seed of the random starts."),
    out: Path | None = typer.Option(None, "--out", help="Output file (.json); Markdown is written next to it."),
    target_class: str | None = typer.Option(
        None, "--target-class", help="Push the images to this class, by name or number; measures how many resist."
    ),
    mask: Path | None = typer.Option(
        None, "--mask", help="Image of the size of the test images; only pixels that are white there may change."
    ),
    keep: Path | None = typer.Option(
        None, "--keep", help="File for the perturbed images of every attack (.npz or .safetensors)."
    ),
    curve: str | None = typer.Option(
        None, "--curve", help="Budgets such as 0,2/255,4/255: accuracy as a function of eps, by one attack (pgd50)."
    ),
    corruptions: str | None = typer.Option(
        None,
        "--corruptions",
        help="Also measure common corruptions, such as all or gaussian-noise,jpeg.",
        autocompletion=complete_corruptions,
    ),
    trust: bool = options.TRUST,
    quiet: bool = options.QUIET,
    as_json: bool = typer.Option(False, "--json", help="Print JSON instead of a table."),
) -> None:
    """Evaluate a model under attack on a test set.

    Writes evaluation.json and evaluation.md to the run folder, or next to the weights. Never replaces an earlier result
    on more images, with AutoAttack, with corruptions, or on the run's own data; the new result is written next to it.
    If interrupted, the same command resumes. Under torchrun, processes share the images.

    \b
    Example: atas evaluate runs/cifar10-preact-resnet18-atas --attacks pgd10,pgd50x5,autoattack
             atas evaluate runs/seeds
             atas evaluate --weights net.safetensors --model resnet18 --data cifar10 --eps 8/255
             atas evaluate --model my_package.networks:trained --data cifar10 --eps 0.5 --norm l2
             torchrun --nproc-per-node 8 -m atas evaluate runs/mine --attacks autoattack
    """
    given = EvaluateOptions(
        weights=weights,
        model=model,
        data=data,
        root=root,
        size=size,
        norm=norm,
        eps=eps,
        mean=mean,
        std=std,
        examples=examples,
        batch_size=batch_size,
        step_size=step_size,
        precision=precision,
        device=device,
        seed=seed,
        out=out,
        attacks=attacks,
        trust=trust,
        quiet=quiet,
        target_class=target_class,
        mask=mask,
        keep=keep,
        curve=curve,
        corruptions=corruptions,
    )
    given.validate(run)

    import_torch(quiet=quiet)
    from atas.cli.curve import measure_curve
    from atas.cli.seeds import evaluate_runs, runs_in
    from atas.cli.target import from_model, from_run
    from atas.training import Run

    if run is not None and (entries := runs_in(run)):
        given.check_several_runs(run)
        evaluate_runs(entries, given, as_json=as_json)
        return
    target = from_model(given) if run is None else from_run(Run.load(run, trust=trust), given)
    show: OutputFormat = "json" if as_json else "table"
    if curve is not None:
        measure_curve(target, show=show)
    else:
        evaluate_target(target, show=show)


def evaluate_run(run: Run, *, show: bool = True, quiet: bool = False, reuse: bool = False) -> Evaluation:
    """Evaluate a run with the settings of its recipe.

    `show` prints the result to standard output, and `quiet` hides the progress. With `reuse`, an earlier result of the
    same weights, attacks and images is returned.
    """
    from atas.cli.seeds import evaluate_once
    from atas.cli.target import from_run

    run_evaluation = evaluate_once if reuse else evaluate_target
    return run_evaluation(from_run(run, EvaluateOptions(quiet=quiet)), show="table" if show else "nothing")


def evaluate_target(target: Target, *, show: OutputFormat) -> Evaluation:
    """Evaluate with a progress display unless it is `quiet`, and write the result and the images to `keep`."""
    from atas.distributed.world import init, select_device
    from atas.evaluation import evaluate as run_evaluation
    from atas.evaluation.progress import EvaluationProgress

    options = target.options
    keep, quiet = options.keep, options.quiet
    with init() as process, locked_path(target, process) as path:
        if keep is not None:
            process.on_rank0(lambda: _check_keep(keep, path))
        progress = path.with_name(f"{path.stem}.progress.json")
        with EvaluationProgress(quiet=quiet or process.rank > 0) as display, explain_resume(progress):
            if process.is_main and (damage := target.damage(path)) is not None:
                display.log(f"{damage}: this evaluation replaces it")
            result = run_evaluation(
                target.model.to(select_device(options.device, process)),
                target.test,
                threat=target.threat,
                attacks=target.attacks,
                batch_size=target.batch_size,
                step_size=target.step_size,
                seed=options.seed,
                precision=options.precision,
                progress=display,
                progress_file=progress,
                shard=process.size > 1,
                targets=target.target_class,
                keep=keep is not None,
                corruptions=options.corruptions or (),
            )
        if process.is_main:
            expected = target.expected if target.step_size is None and not result.restricted else None
            notes = [] if expected is None else expected.compare(result.n, result.accuracy)
            if keep is not None:  # before the result, whose writing removes the saved progress
                result.save_adversarial(keep)
                notes.append(f"written: {keep}")
            _write(result, path, notes, show=show, shown_warnings=set() if quiet else display.shown_warnings)
    return result


def _check_keep(keep: Path, result: Path) -> None:
    """Raise an error if the perturbed images cannot be written, or would replace another file."""
    from atas.evaluation.adversarial import check_replaceable
    from atas.evaluation.details import details_path

    check_writable(keep)
    if keep.resolve() == details_path(result).resolve():
        raise UsageError(f"--keep cannot be {keep}: the result writes its own images there; give another name")
    check_replaceable(keep)


@contextmanager
def locked_path(target: Target, process: World) -> Iterator[Path]:
    """Choose the file of the result, and keep other evaluations from writing it or its progress file."""
    from atas._utils.files import file_lock
    from atas.evaluation.details import check_replaceable

    with ExitStack() as stack:

        def lock() -> Path:
            path: Path | None = None
            while path != (chosen := target.result_path()):  # until nobody has written a better result meanwhile
                stack.close()
                path = chosen
                check_writable(path)
                check_replaceable(path)
                sentence = f"another process evaluates into {path}; wait for it, or name another file with --out"
                stack.enter_context(file_lock(path.with_name(f".{path.name}.lock"), sentence))
            return path

        yield process.on_rank0(lock)


@contextmanager
def explain_resume(progress: Path) -> Iterator[None]:
    """Explain how to resume if the user interrupts an evaluation with saved progress."""
    from atas.training.trainer import Interrupted

    try:
        yield
    except KeyboardInterrupt:
        if not progress.exists():
            raise
        raise Interrupted(f"interrupted; the same command resumes from {progress}") from None


def _write(
    result: Evaluation,
    path: Path,
    notes: list[str],
    *,
    show: OutputFormat,
    shown_warnings: set[EvaluationWarning],
) -> None:
    """Print and write the result; a closed pipe does not prevent the writing."""
    from atas._utils.files import write_text

    page = path.with_suffix(".md")
    try:
        show_result(result, show, shown_warnings)
    finally:
        write_text(page, result.markdown())
        result.save(path)  # last, since it deletes the saved progress
    if show == "table":
        for note in notes:
            print_line(note, wrap=True)
        print_line(f"written: {page}")
        print_line(f"written: {path}")


def show_result(result: Evaluation, show: OutputFormat, shown_warnings: Collection[EvaluationWarning] = ()) -> None:
    """Print a result: tables, the warnings that were not shown yet, and a sentence for a paper."""
    if show == "json":
        print_json(json.dumps(result.to_json(), indent=2))
    elif show == "table":
        print_table(result.table())
        if result.corruptions:
            print_table(result.corruption_table())
        for warning in result.warnings:
            if warning not in shown_warnings:
                print_line(f"warning: {warning}", wrap=True)
        print_line(result.sentence(), wrap=True)
