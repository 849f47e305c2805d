"""A run: the folder of a training with its recipe, metrics, checkpoints and weights; and folders of several runs.

The seeds of one recipe are in `seed-0`, `seed-1`, ... of a folder.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from torch import nn

from atas import recipes
from atas._utils.documents import MalformedError, read_json
from atas._utils.environment import Environment
from atas._utils.files import write_text
from atas._utils.formatting import shell_quote
from atas.errors import DataError
from atas.models import published
from atas.models.weights import LAST_CHECKPOINT, load_weights
from atas.recipes import Recipe
from atas.training.metrics import completed_epochs, read_metrics

DIVERGED = "diverged"  # the event that ends the metrics of a run whose loss became infinite or NaN
_SEED_FOLDER = re.compile(r"seed-(-?\d+)", re.ASCII)
_CHECKSUM = "# checksum of what follows: "
ROWS_KEY = "rows"  # in environment.json of a run on a part of the training images: their number


class Skipped(TypedDict):
    """The content of skipped.json: each image with its path in the data's folder, and why it cannot be decoded."""

    skipped: list[tuple[str, str]]


@dataclass(frozen=True)
class RunFolder:
    """The paths in a run's folder."""

    path: Path

    @property
    def recipe(self) -> Path:
        """The resolved recipe."""
        return self.path / "recipe.toml"

    @property
    def environment(self) -> Path:
        """Versions and hardware, as JSON."""
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        """One line of JSON per epoch or event."""
        return self.path / "metrics.jsonl"

    @property
    def written(self) -> tuple[Path, ...]:
        """The files that a training replaces as a whole."""
        checkpoints = self.last_checkpoint, self.healthy_checkpoint
        return self.recipe, self.environment, *checkpoints, self.model, self.training_examples

    def read_metrics(self) -> list[dict[str, Any]]:
        """Return the rows of the metrics; raise DataError if they are damaged."""
        return read_metrics(self.metrics, finished=self.model.exists())

    def read_environment(self) -> dict[str, Any]:
        """Return versions and hardware, or an empty dict if there is no file; raise DataError if it is damaged."""
        if not self.environment.exists():
            return {}
        try:
            content: dict[str, Any] = read_json(self.environment, Environment)
        except OSError as error:
            raise DataError(f"cannot read {self.environment}: {error.strerror or error}") from error
        except MalformedError as error:
            raise DataError(
                f"{self.environment} is damaged ({error}); restore it from a copy, or remove it; versions and "
                f"hardware of the training are then unknown"
            ) from error
        return content

    @property
    def skipped(self) -> Path:
        """The damaged images that the training left out, as JSON."""
        return self.path / "skipped.json"

    def read_skipped(self) -> list[str] | None:
        """Return the paths of images that the training left out; None if there is no list. Raises DataError if the
        list is damaged."""
        if not self.skipped.exists():
            return None
        try:
            content: Skipped = read_json(self.skipped, Skipped)
        except OSError as error:
            raise DataError(f"cannot read {self.skipped}: {error.strerror or error}") from error
        except MalformedError as error:
            raise DataError(
                f"{self.skipped}, the list of damaged images that were left out, is damaged ({error}); restore it from "
                "a copy, or start again with --overwrite"
            ) from error
        return [name for name, _ in content["skipped"]]

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

    def average(self, decay: float) -> Path:
        """The weights of a further average, if `training.ema` lists several decays."""
        return self.path / f"model-ema-{decay:g}.safetensors"

    @property
    def averages(self) -> list[Path]:
        """The weights of further averages that exist."""
        return sorted(self.path.glob("model-ema-*.safetensors"))

    @property
    def training_examples(self) -> Path:
        """Training examples by gradient norm, of methods with adaptive step sizes."""
        return self.path / "training_examples.safetensors"

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
        """The page that `atas report` writes."""
        return self.path / "report.html"

    @property
    def exports(self) -> Path:
        """The exports, a folder per format."""
        return self.path / "export"


@dataclass(frozen=True)
class Run:
    """A finished run: its folder, the recipe, the trained model in eval mode, and a row of metrics per epoch."""

    folder: Path
    recipe: Recipe = field(repr=False)
    model: nn.Module = field(repr=False)
    metrics: list[dict[str, Any]] = field(repr=False)

    @classmethod
    def load(cls, folder: str | Path, model: nn.Module | None = None, *, trust: bool = False) -> Run:
        """Load a run from its folder; `model` is needed only if it was passed in Python for the training.

        `trust` allows the folder to name code (`package.module:function`), which is imported and run.
        """
        run_folder = RunFolder(Path(folder))
        recipe = load_recipe(run_folder, trust=trust)
        rows = run_folder.read_metrics()
        if not run_folder.model.exists():
            raise DataError(f"the run {folder} has not finished{_resume_hint(run_folder, recipe, rows)}")
        return cls(run_folder.path, recipe, load_weights(run_folder.model, model, trust=trust), completed_epochs(rows))


def _resume_hint(run_folder: RunFolder, recipe: Recipe, rows: list[dict[str, Any]]) -> str:
    """Return what to do about a run without weights; a run that diverged would diverge again if it was resumed."""
    if rows and rows[-1].get("event") == DIVERGED:
        advice = divergence_advice(recipe)
        return f": it diverged in epoch {rows[-1]['epoch'] + 1}; start again with --overwrite and {advice}"
    return f"; continue with: atas train --resume --out {shell_quote(run_folder.path)}{recipe.trust_option}"


def divergence_advice(recipe: Recipe) -> str:
    """Return what to change in the recipe of a training that diverged."""
    consistency, method = recipe.consistency, recipe.method_class
    mode = recipe.method.settings.get("attack_mode", "auto")
    attacks_in = method.attack_mode if mode == "auto" and method is not None else mode
    chases = consistency.distance == "logits" and consistency.through == "trained" and attacks_in == "eval"
    if consistency.weight and chases:
        return (
            "consistency.through = both or consistency.distance = js: the start's logits are constants in eval mode, "
            "and those of the trained point can run after them without bound"
        )
    if recipe.optimizer.weight_decay >= 1:
        return "a smaller optimizer.weight_decay or schedule.peak"
    return "a smaller consistency.weight or schedule.peak" if consistency.weight else "a smaller schedule.peak"


def load_recipe(run_folder: RunFolder, *, trust: bool = False) -> Recipe:
    """Load the recipe of a run's folder; without `trust`, what it names as code is never imported."""
    if not run_folder.recipe.exists():
        inner = sorted(run_folder.path.glob(f"*/{run_folder.recipe.name}"))
        if inner:
            raise DataError(f"{run_folder.path} holds several runs; pass the folder of one, such as {inner[0].parent}")
        why = "it holds no recipe.toml" if run_folder.path.exists() else "there is no such folder"
        if run_folder.path.is_file():
            why = "it is a file"
        remedy = "pass a folder that `atas train` wrote"
        if published.is_name(str(run_folder.path)):
            remedy = f"a published model is evaluated with --weights {run_folder.path} --data NAME"
        raise DataError(f"{run_folder.path} is not the folder of a run: {why}; {remedy}")
    _check_recipe(run_folder.recipe)
    return recipes.load(run_folder.recipe, trusted=trust)


def write_recipe(run_folder: RunFolder, recipe: Recipe) -> None:
    """Write the recipe of a run, with its command and a checksum as comments.

    A file that lost its end or a line is valid TOML with other settings, and evaluations take their budget from it.
    """
    content = recipe.to_toml()
    write_text(run_folder.recipe, f"# atas train {run_folder.recipe}\n{_CHECKSUM}{_checksum(content)}\n{content}")


def _check_recipe(path: Path) -> None:
    """Raise DataError if a run's recipe is not what was written; earlier versions wrote no checksum."""
    lines = path.read_bytes().decode("utf-8", errors="replace").split("\n", 2)
    if len(lines) == 3 and lines[1].startswith(_CHECKSUM) and lines[1] != _CHECKSUM + _checksum(lines[2]):
        raise DataError(
            f"{path} was changed or damaged since its run began (its checksum is wrong): restore it, or remove its "
            f"second line to use it as it is"
        )


def _checksum(content: str) -> str:
    return f"{zlib.crc32(content.encode()):08x}"


def seed_folder(group: Path, seed: int) -> Path:
    """Return the folder of the run with this seed.

    >>> seed_folder(Path("runs/x"), 2).as_posix()
    'runs/x/seed-2'
    """
    return group / f"seed-{seed}"


def seed_runs(folder: Path) -> list[Path]:
    """Return the runs of a folder that holds the seeds of one recipe, in the order of the seeds; empty for others."""
    if _is_run(folder) or not folder.is_dir():
        return []
    seeds = {path: match for path in folder.iterdir() if (match := _SEED_FOLDER.fullmatch(path.name)) and _is_run(path)}
    return sorted(seeds, key=lambda path: int(seeds[path][1]))


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """Return the folders, with one that only holds runs replaced by its runs and groups of seeds, by name."""
    found = []
    for folder in folders:
        inner: list[Path] = []
        if folder.is_dir() and not _is_run(folder) and not seed_runs(folder):
            inner = [path for path in sorted(folder.iterdir()) if _is_run(path) or seed_runs(path)]
        found += inner or [folder]
    return found


def _is_run(path: Path) -> bool:
    return RunFolder(path).recipe.exists()
