"""What the paper's figures measure of a training, besides the accuracies of its model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from atas import methods
from atas.core.augment import View
from atas.errors import DataError
from atas.methods import AdaptiveStepSizes
from atas.methods.base import PersistentPerturbation
from atas.models.weights import load_weights
from atas.paper import gradient_norms, losses
from atas.paper.snapshots import SnapshotRecorder, list_snapshots
from atas.sweeps.store import SNAPSHOTS, Store
from atas.sweeps.trial import FinishedTraining, Measurement, Trial
from atas.training import checkpoint
from atas.training.callbacks import Callback
from atas.training.metrics import completed_epochs, read_metrics
from atas.training.run import RunFolder

_NORMS = "norms"
DECILES = "tenths"
_COLUMNS = ("epoch", "updates", "loss", "clean", "fgsm", "pgd10", "pgd10_loss", "step_size")


@dataclass(frozen=True)
class Curves(Measurement):
    """The monitor's looks by epoch; among them the loss under PGD-10."""

    name: ClassVar[str] = "curves"

    def is_available(self, trial: Trial, run_folder: RunFolder) -> bool:
        """Always, but for trainings of versions that did not look at the loss."""
        rows = completed_epochs(read_metrics(run_folder.metrics)) if run_folder.metrics.exists() else []
        return bool(rows) and all("pgd10_loss" in row for row in rows)

    def measure(self, training: FinishedTraining) -> dict[str, Any]:
        """A list for each column; epochs count from 1."""
        rows = [
            row | {"epoch": row["epoch"] + 1} for row in completed_epochs(read_metrics(training.run_folder.metrics))
        ]
        fallen = next((row["epoch"] for row in rows if row["collapsed"]), None)
        return {name: [row[name] for row in rows] for name in _COLUMNS if name in rows[0]} | {"collapsed_in": fallen}


@dataclass(frozen=True)
class Norms(Measurement):
    """Gradient norms and step sizes by epoch and tenth; of methods with adaptive steps alone."""

    name: ClassVar[str] = "norms"

    def callbacks(self, run_folder: RunFolder) -> list[Callback]:
        """A file an epoch."""
        return [gradient_norms.EpochNorms(run_folder.path / _NORMS)]

    def is_available(self, trial: Trial, run_folder: RunFolder) -> bool:
        """Whether the files are there."""
        return gradient_norms.has_norms(run_folder.path / _NORMS, trial.resolved_recipe.training.epochs)

    def measure(self, training: FinishedTraining) -> dict[str, Any]:
        """Tails, a histogram, and the course of every tenth."""
        return gradient_norms.summary(
            *gradient_norms.read_norms(
                training.run_folder.path / _NORMS, training.trial.resolved_recipe.training.epochs
            )
        )


@dataclass(frozen=True)
class Deciles(Norms):
    """In which tenth by gradient norm every training image is, and the shares of the classes."""

    name: ClassVar[str] = DECILES

    def measure(self, training: FinishedTraining) -> dict[str, Any]:
        """A digit an image, 0 for the first tenth."""
        found, _ = gradient_norms.read_norms(
            training.run_folder.path / _NORMS, training.trial.resolved_recipe.training.epochs
        )
        decile = gradient_norms.deciles(gradient_norms.mean_norms(found))
        shares = gradient_norms.class_shares(decile, training.data.train.labels, training.data.num_classes)
        return {"of_each": "".join(str(number - 1) for number in decile.tolist()), "class_shares": shares.tolist()}


@dataclass(frozen=True)
class RobustLoss(Measurement):
    """The loss of the final weights on the training images under PGD-10, all of them or the first so many."""

    images: int | None = None
    name: ClassVar[str] = "robust-loss"

    def is_available(self, trial: Trial, run_folder: RunFolder) -> bool:
        """It needs the weights alone."""
        return True

    def matches_unstated(self, entry: dict[str, Any]) -> bool:
        """Compare the number of images."""
        return self.images in (None, entry["n"])

    def measure(self, training: FinishedTraining) -> dict[str, Any]:
        """Mean loss, its standard error, and accuracy."""
        images, labels = training.data.train.images[: self.images], training.data.train.labels[: self.images]
        with losses.prepare_runner(training.model, images) as runner:
            loss, right = losses.attack_losses(
                runner, images, labels, [losses.pgd10(training.trial.resolved_recipe.threat)]
            )
        spread = float(loss.double().std()) / len(images) ** 0.5
        return {"n": len(images), "loss": float(loss.double().mean()), "error": spread, "right": int(right.sum())}


@dataclass(frozen=True)
class StepGap(Measurement):
    """How much more loss PGD-10 finds on training images than one step of each size does."""

    steps: tuple[float, ...] = ()
    images: int | None = None
    name: ClassVar[str] = "step-gap"

    def is_available(self, trial: Trial, run_folder: RunFolder) -> bool:
        """A method that remembers perturbations steps from them, and the last checkpoint has them."""
        return (
            not issubclass(methods.get(trial.resolved_recipe.method.name), PersistentPerturbation)
            or run_folder.last_checkpoint.exists()
        )

    def matches_unstated(self, entry: dict[str, Any]) -> bool:
        """Compare the step sizes and the number of images."""
        return entry["steps"] == list(self.steps) and self.images in (None, entry["n"])

    def measure(self, training: FinishedTraining) -> dict[str, Any]:
        """The mean gap for each size: from noise, and from memory where there is one."""
        threat = training.trial.resolved_recipe.threat
        images, labels = training.data.train.images[: self.images], training.data.train.labels[: self.images]
        memory = _load_method(training)
        starts: dict[str, losses.Start] = {"noise": lambda x, index: losses.random_start(threat, x, index)}
        if memory is not None:
            starts["memory"] = lambda x, index: memory.load_start(x, index, View.centre(len(x), memory.pad, x.device))
        steps = [losses.single_steps(threat, self.steps, start) for start in starts.values()]
        with losses.prepare_runner(training.model, images) as runner:
            loss, _ = losses.attack_losses(runner, images, labels, [losses.pgd10(threat), *steps])
        found, count = losses.loss_gaps(loss[1:], loss[0]), len(self.steps)
        gaps = {name: found[place * count :][:count] for place, name in enumerate(starts)}
        return {"n": len(images), "steps": list(self.steps), "pgd10": float(loss[0].double().mean()), "gap": gaps}


@dataclass(frozen=True)
class LossSurfaces(Measurement):
    """The loss around images of the first and the last tenth of a ranking, at the moments around a collapse."""

    ranking: Trial
    images: int = 500
    points: int = 11
    name: ClassVar[str] = "surfaces"

    @property
    def depends_on(self) -> tuple[Trial, ...]:
        """The run that ranks."""
        return (self.ranking,)

    def callbacks(self, run_folder: RunFolder) -> list[Callback]:
        """Weights on the way."""
        return [SnapshotRecorder(run_folder.path / SNAPSHOTS)]

    def is_available(self, trial: Trial, run_folder: RunFolder) -> bool:
        """Whether there are such weights, of all moments."""
        return SnapshotRecorder(run_folder.path / SNAPSHOTS).complete(trial.resolved_recipe.training.epochs)

    def matches_unstated(self, entry: dict[str, Any]) -> bool:
        """Compare the number of images."""
        return bool(entry["n"] == self.images)

    def measure(self, training: FinishedTraining) -> dict[str, Any]:
        """A grid for each moment and tenth."""
        deciles, train = load_deciles(self.ranking, training.store), training.data.train
        rows = {
            number: gradient_norms.decile_members(deciles, number, number)[: self.images]
            for number in (1, gradient_norms.NUM_DECILES)
        }
        model = load_weights(training.run_folder.model).to(training.device)
        moments = []
        for shot in list_snapshots(training.run_folder.path / SNAPSHOTS):
            shot.load_into(model)
            grids = {
                str(number): losses.loss_surface(
                    model, train.images[part], train.labels[part], training.trial.resolved_recipe.threat, self.points
                )
                for number, part in rows.items()
            }
            moments.append(
                {"step": shot.step}
                | {name: [gradient_norms.rounded(row) for row in grid] for name, grid in grids.items()}
            )
        batch = training.trial.resolved_recipe.training.batch_size
        return {"n": len(rows[1]), "steps_an_epoch": -(-len(train) // batch), "moments": moments}


def default_measurements(trial: Trial) -> tuple[Measurement, ...]:
    """What costs next to nothing to observe, and so is observed in every training of a study."""
    adaptive = issubclass(methods.get(trial.resolved_recipe.method.name), AdaptiveStepSizes)
    return (Curves(), Norms()) if adaptive else (Curves(),)


def _load_method(training: FinishedTraining) -> PersistentPerturbation | None:
    """The method with what it remembered at the end of the training; None for one that remembers nothing."""
    recipe, train = training.trial.resolved_recipe, training.data.train
    if not issubclass(methods.get(recipe.method.name), PersistentPerturbation):
        return None
    shape, pad = train.images.shape[1:], recipe.data.pad
    found = methods.create(
        recipe.method.name,
        recipe.threat,
        len(train),
        shape,
        pad=pad,
        device=training.device,
        **recipe.method.settings,
    )
    assert isinstance(found, PersistentPerturbation)
    tensors, _ = checkpoint.load(training.run_folder.last_checkpoint)
    prefix = "method."
    found.load_state_dict({key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)})
    return found


def load_deciles(ranking: Trial, store: Store) -> Tensor:
    """The tenth of every training image, 1 to 10, that a trial was asked to observe."""
    record = store.record(ranking)
    if record is None or DECILES not in record.observed:
        raise DataError(f"the run that ranks the images is missing ({ranking.label}); the same command tries it again")
    return torch.tensor([int(digit) + 1 for digit in record.observed[DECILES]["of_each"]])
