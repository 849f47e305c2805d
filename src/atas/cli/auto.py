"""`atas train --auto`: train on data within a given time, with settings chosen from the data, and judge the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atas._utils.console import print_json, print_line, print_table
from atas.errors import UsageError

if TYPE_CHECKING:
    from atas.autotrain import AutoTrainResult

_MINUTES, _EPS = 10.0, "8/255"


@dataclass(frozen=True)
class AutoOptions:
    """The options of the command that belong to --auto, as given."""

    data: str | None
    minutes: float | None
    eps: str | None

    def validate(self, others: Mapping[str, object]) -> None:
        """Raise UsageError if options are missing or conflict; `others` are options that --auto does not take, with
        their values."""
        if self.data is None:
            if self.minutes is not None:
                raise UsageError("--minutes is for --auto DATA; leave it out, or set training.epochs")
            if self.eps is not None:
                raise UsageError(f"--eps is for --auto DATA; with a recipe, pass --set method.eps={self.eps}")
            return
        for option, value in others.items():
            if value not in (None, False):
                hint = "; a stopped run continues with --resume --out FOLDER alone" if option == "--resume" else ""
                raise UsageError(f"--auto cannot be combined with {option}{hint or '; leave one of them out'}")


def train_auto(
    given: AutoOptions,
    *,
    out: Path | None,
    seed: int | None,
    values: Mapping[str, Any],
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Train and evaluate, and print the verdict."""
    from rich.console import Console

    from atas.autotrain import robustify
    from atas.recipes.values import parse_value
    from atas.training import TrainingProgress

    eps = float(parse_value(given.eps or _EPS, float, "--eps"))
    result = robustify(
        None,
        given.data,
        eps=eps,
        minutes=_MINUTES if given.minutes is None else given.minutes,
        out=out,
        seed=seed or 0,
        values=values,
        overwrite=overwrite,
        live=TrainingProgress(Console(stderr=as_json, quiet=quiet)),
    )
    if as_json:
        print_json(json.dumps(_to_json(result), indent=2))
        return
    print_table(result.evaluation.table())
    for sentence in result.verdict:
        print_line(sentence, wrap=": atas " not in sentence)  # a command is copied


def _to_json(result: AutoTrainResult) -> dict[str, Any]:
    run = result.run
    return {
        "folder": str(run.folder),
        "recipe": run.recipe.name,
        "epochs": len(run.metrics),
        "last_epoch": run.metrics[-1],
        "evaluation": result.evaluation.to_json(),
        "choices": result.choices,
        "verdict": result.verdict,
    }
