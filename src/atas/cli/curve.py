"""`atas evaluate --curve`."""

from __future__ import annotations

import json

from atas._utils.console import print_json, print_line, print_table
from atas.cli.evaluate import OutputFormat, explain_resume, locked_path
from atas.cli.target import Target, budgets
from atas.distributed.world import init, select_device
from atas.errors import UsageError
from atas.evaluation import AccuracyCurve, accuracy_curve
from atas.evaluation.progress import EvaluationProgress

_DEFAULT_ATTACK = "pgd50"


def measure_curve(target: Target, *, show: OutputFormat) -> None:
    """Measure the accuracy at several budgets with a progress display, and write it."""
    options = target.options
    attacks = options.attacks_or_default((_DEFAULT_ATTACK,))
    if len(attacks) != 1:
        raise UsageError(f"--curve takes one attack, such as --attacks apgd-ce; got {', '.join(attacks)}")
    assert options.curve is not None
    with init() as process, locked_path(target, process) as path:
        if process.size > 1:
            raise UsageError("--curve runs in one process: start it without torchrun")
        progress = path.with_name(f"{path.stem}.progress.json")
        with EvaluationProgress(quiet=options.quiet) as display, explain_resume(progress):
            curve = accuracy_curve(
                target.model.to(select_device(options.device, process)),
                target.test.images,
                target.test.labels,
                target.threat,
                eps=budgets(options.curve),
                attack=attacks[0],
                batch_size=target.batch_size,
                step_size=target.step_size,
                seed=options.seed,
                precision=options.precision,
                progress=display,
                progress_file=progress,
            )
        try:
            _show(curve, show)
        finally:
            curve.save(path)
        if show == "table":
            print_line(f"written: {path}")


def _show(curve: AccuracyCurve, show: OutputFormat) -> None:
    if show == "json":
        print_json(json.dumps(curve.to_json(), indent=2))
        return
    print_table(curve.table())
    for warning in curve.warnings:
        print_line(f"warning: {warning}", wrap=True)
    print_line(curve.sentence(), wrap=True)
