"""A run: a folder with everything that a training was and gave."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from atas import recipes
from atas._utils.formatting import shell_quote
from atas.errors import DataError
from atas.models.weights import LAST_CHECKPOINT, load_weights
from atas.recipes import Recipe
from atas.training.metrics import completed_epochs, read_metrics

DIVERGED = "diverged"  # the event that ends the metrics of such a run
ROWS_KEY = "rows"  # in the environment of a run on a part of the training images: how many


@dataclass(frozen=True)
class RunFolder:
    """Where things lie in a run's folder."""

    path: Path

    @property
    def recipe(self) -> Path:
        """The resolved recipe."""
        return self.path / "recipe.toml"

    @property
    def environment(self) -> Path:
        """Versions and hardware."""
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        """A line an epoch."""
        return self.path / "metrics.jsonl"

    @property
    def last_checkpoint(self) -> Path:
        """The checkpoint to resume from."""
        return self.path / LAST_CHECKPOINT

    @property
    def healthy_checkpoint(self) -> Path:
        """The checkpoint to return to after a collapse."""
        return self.last_checkpoint.with_name("healthy.safetensors")

    @property
    def model(self) -> Path:
        """The weights that the training ended with."""
        return self.path / "model.safetensors"

    @property
    def evaluation(self) -> Path:
        """The result of `atas evaluate`."""
        return self.path / "evaluation.json"

    @property
    def lock(self) -> Path:
        """Held by the process that trains here."""
        return self.path / ".lock"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's files."""
        return self.path / "tensorboard"

    @property
    def wandb(self) -> Path:
        """Files of Weights & Biases."""
        return self.path / "wandb"

    @property
    def report(self) -> Path:
        """What `atas report` wrote."""
        return self.path / "report.html"

    @property
    def exports(self) -> Path:
        """What `atas export` wrote, a folder a format."""
        return self.path / "export"


@dataclass(frozen=True)
class Run:
    """A finished run: its folder, the recipe, the trained model in eval mode, and a row of metrics an epoch."""

    folder: Path
    recipe: Recipe = field(repr=False)
    model: nn.Module = field(repr=False)
    metrics: list[dict[str, Any]] = field(repr=False)

    @classmethod
    def load(cls, folder: str | Path, model: nn.Module | None = None) -> Run:
        """A run from its folder; `model` is needed only where it was passed in Python at training."""
        run_folder = RunFolder(Path(folder))
        recipe = load_recipe(run_folder)
        rows = read_metrics(run_folder.metrics)
        if not run_folder.model.exists():
            raise DataError(f"the run {folder} has not finished{_resume_hint(run_folder, recipe, rows)}")
        return cls(run_folder.path, recipe, load_weights(run_folder.model, model), completed_epochs(rows))


def _resume_hint(run_folder: RunFolder, recipe: Recipe, rows: list[dict[str, Any]]) -> str:
    """What is left to do with a run that has no weights; one that diverged would do so again."""
    if rows and rows[-1].get("event") == DIVERGED:
        advice = divergence_advice(recipe)
        return f": it diverged in epoch {rows[-1]['epoch'] + 1}; begin anew with --overwrite and {advice}"
    return f"; go on with: atas train --resume --out {shell_quote(run_folder.path)}"


def divergence_advice(recipe: Recipe) -> str:
    """What to set where a training diverges."""
    large = recipe.optimizer.weight_decay >= 1
    return "a smaller optimizer.weight_decay or schedule.peak" if large else "a smaller schedule.peak"


def load_recipe(run_folder: RunFolder) -> Recipe:
    """The recipe of a run's folder."""
    if not run_folder.recipe.exists():
        why = "it holds no recipe.toml" if run_folder.path.exists() else "there is no such folder"
        raise DataError(f"{run_folder.path} is not the folder of a run: {why}; give one that `atas train` made")
    return recipes.load(run_folder.recipe)
