"""The measurements of the paper's figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from atas import methods
from atas.core.augment import View
from atas.distributed.sharding import DataShard
from atas.errors import DataError
from atas.methods import AdaptiveStepSizes
from atas.methods.base import PersistentPerturbation
from atas.models.weights import load_weights
from atas.paper import gradient_norms, losses
from atas.paper.snapshots import SnapshotRecorder, list_snapshots
from atas.sweeps.store import SNAPSHOTS, Store
from atas.sweeps.trial import FinishedTraining, Measurement, Trial
from atas.training import checkpoint
from atas.training.build import build_method
from atas.training.callbacks import Callback
from atas.training.metrics import completed_epochs
from atas.training.run import RunFolder

_NORMS = "norms"
DECILES = "tenths"
_COLUMNS = ("epoch", "updates", "loss", "clean", "fgsm", "pgd10", "pgd10_loss", "step_size")


@dataclass(frozen=True)
class Curves(Measurement):
    """The monitor's metrics by epoch, among them the loss under PGD-10."""

    name: ClassVar[str] = "curves"

    def is_available(self, trial: Trial, run_folder: RunFolder) -> bool:
        """Return whether the metrics have the loss under PGD-10, which early versions did not write."""
        rows = completed_epochs(run_folder.read_metrics())
        return bool(rows) and all("pgd10_loss" in row for row in rows)

    def measure(self, training: FinishedTraining) -> dict[str, Any]:
        """Return a list for each column; epochs count from 1."""
        rows = [row | {"epoch": row["epoch"] + 1} for row in completed_epochs(training.run_folder.read_metrics())]
        collapsed = next((row["epoch"] for row in rows if row["collapsed"]), None)
        return {name: [row[name] for row in rows] for name in _COLUMNS if name in rows[0]} | {"collapsed_in": collapsed}


@dataclass(frozen=True)
class Norms(Measurement):
    """Gradient norms and step sizes by epoch and decile, for methods with adaptive steps."""

    name: ClassVar[str] = "norms"

    def callbacks(self, run_folder: RunFolder) -> list[Callback]:
        """Return the callback that writes a file per epoch."""
        return [gradient_norms.EpochNorms(run_folder.path / _NORMS)]

    def is_available(self, trial: Trial, run_folder: RunFolder) -> bool:
        """Return whether all files exist."""
        return gradient_norms.has_norms(run_folder.path / _NORMS, trial.resolved_recipe.training.epochs)

    def measure(self, training: FinishedTraining) -> dict[str, Any]:
        """Return tails, a histogram, and the means of each decile by epoch."""
        return gradient_norms.summary(
            *gradient_norms.read_norms(
                training.run_folder.path / _NORMS, training.trial.resolved_recipe.training.epochs
            )
        )


@dataclass(frozen=True)
class Deciles(Norms):
    """The decile of every training image by gradient norm, and the shares of the classes."""

    name: ClassVar[str] = DECILES

    def measure(self, training: FinishedTraining) -> dict[str, Any]:
        """Return a digit per image, 0 for the first decile, and the class shares."""
        norms, _ = gradient_norms.read_norms(
            training.run_folder.path / _NORMS, training.trial.resolved_recipe.training.epochs
        )
        decile = gradient_norms.deciles(gradient_norms.mean_norms(norms))
        shares = gradient_norms.class_shares(decile, training.data.train.labels, training.data.num_classes)
        return {"of_each": "".join(str(number - 1) for number in decile.tolist()), "class_shares": shares.tolist()}


@dataclass(frozen=True)
class RobustLoss(Measurement):
    """The loss of the final weights under PGD-10 on all training images, or on the first `images`."""

    images: int | None = None
    name: ClassVar[str] = "robust-loss"

    def is_available(self, trial: Trial, run_folder: RunFolder) -> bool:
        """Return True: only the weights are needed."""
        return True

    def matches_unstated(self, entry: dict[str, Any]) -> bool:
        """Compare the number of images."""
        return self.images in (None, entry["n"])

    def measure(self, training: FinishedTraining) -> dict[str, Any]:
        """Return the mean loss, its standard error, and the number of correct images."""
        images, labels = training.data.train.images[: self.images], training.data.train.labels[: self.images]
        with losses.prepare_runner(training.model, images) as runner:
            loss, right = losses.attack_losses(
                runner, images, labels, [losses.pgd10(training.trial.resolved_recipe.threat)]
            )
        spread = float(loss.double().std()) / len(images) ** 0.5
        return {"n": len(images), "loss": float(loss.double().mean()), "error": spread, "right": int(right.sum())}


@dataclass(frozen=True)
class StepGap(Measurement):
    """The mean loss of PGD-10 on training images minus that of one step of each size."""

    steps: tuple[float, ...] = ()
    images: int | None = None
    name: ClassVar[str] = "step-gap"

    def is_available(self, trial: Trial, run_folder: RunFolder) -> bool:
        """Return whether the stored perturbations, from which the method steps, are in the last checkpoint."""
        return (
            not issubclass(methods.get(trial.resolved_recipe.method.name, trusted=True), PersistentPerturbation)
            or run_folder.last_checkpoint.exists()
        )

    def matches_unstated(self, entry: dict[str, Any]) -> bool:
        """Compare the step sizes and the number of images."""
        return entry["steps"] == list(self.steps) and self.images in (None, entry["n"])

    def measure(self, training: FinishedTraining) -> dict[str, Any]:
        """Return the mean gap for each size: from noise, and from stored perturbations if there are any."""
        threat = training.trial.resolved_recipe.threat
        images, labels = training.data.train.images[: self.images], training.data.train.labels[: self.images]
        method = _load_method(training)
        starts: dict[str, losses.Start] = {"noise": lambda x, index: losses.random_start(threat, x, index)}
        if method is not None:
            starts["memory"] = lambda x, index: method.load_start(x, index, View.centre(len(x), method.pad, x.device))
        steps = [losses.single_steps(threat, self.steps, start) for start in starts.values()]
        with losses.prepare_runner(training.model, images) as runner:
            loss, _ = losses.attack_losses(runner, images, labels, [losses.pgd10(threat), *steps])
        values, count = losses.loss_gaps(loss[1:], loss[0]), len(self.steps)
        gaps = {name: values[number * count :][:count] for number, name in enumerate(starts)}
        return {"n": len(images), "steps": list(self.steps), "pgd10": float(loss[0].double().mean()), "gap": gaps}


@dataclass(frozen=True)
class LossSurfaces(Measurement):
    """The loss around images of the first and the last decile of a ranking, at steps around a collapse."""

    ranking: Trial
    images: int = 500
    points: int = 11
    name: ClassVar[str] = "surfaces"

    @property
    def depends_on(self) -> tuple[Trial, ...]:
        """The trial that ranks the images."""
        return (self.ranking,)

    def callbacks(self, run_folder: RunFolder) -> list[Callback]:
        """Return the callback that saves weights during the training."""
        return [SnapshotRecorder(run_folder.path / SNAPSHOTS)]

    def is_available(self, trial: Trial, run_folder: RunFolder) -> bool:
        """Return whether the weights of all steps are there."""
        return SnapshotRecorder(run_folder.path / SNAPSHOTS).complete(trial.resolved_recipe.training.epochs)

    def matches_unstated(self, entry: dict[str, Any]) -> bool:
        """Compare the number of images."""
        return bool(entry["n"] == self.images)

    def measure(self, training: FinishedTraining) -> dict[str, Any]:
        """Return a grid for each step and decile."""
        deciles, train = load_deciles(self.ranking, training.store), training.data.train
        rows = {
            number: gradient_norms.decile_members(deciles, number, number)[: self.images]
            for number in (1, gradient_norms.NUM_DECILES)
        }
        planned = training.trial.resolved_recipe.model.name
        model = load_weights(training.run_folder.model, trust=planned).to(training.device)
        moments = []
        for shot in list_snapshots(training.run_folder.path / SNAPSHOTS):
            shot.load_into(model)
            grids = {
                str(number): losses.loss_surface(
                    model, train.images[index], train.labels[index], training.trial.resolved_recipe.threat, self.points
                )
                for number, index in rows.items()
            }
            moments.append(
                {"step": shot.step}
                | {name: [gradient_norms.rounded(row) for row in grid] for name, grid in grids.items()}
            )
        batch = training.trial.resolved_recipe.training.batch_size
        return {"n": len(rows[1]), "steps_an_epoch": -(-len(train) // batch), "moments": moments}


def default_measurements(trial: Trial) -> tuple[Measurement, ...]:
    """Return the measurements that cost almost nothing; every training of a study has them."""
    adaptive = issubclass(methods.get(trial.resolved_recipe.method.name, trusted=True), AdaptiveStepSizes)
    return (Curves(), Norms()) if adaptive else (Curves(),)


def _load_method(training: FinishedTraining) -> PersistentPerturbation | None:
    """Return the method with the perturbations of the last checkpoint, or None for a method without any."""
    recipe, train = training.trial.resolved_recipe, training.data.train
    if not issubclass(methods.get(recipe.method.name, trusted=True), PersistentPerturbation):
        return None
    shard, shape = DataShard(len(train)), train.images.shape[1:]
    method = build_method(recipe, shard, shape, training.data.num_classes, training.device)
    assert isinstance(method, PersistentPerturbation)
    tensors, _ = checkpoint.load(training.run_folder.last_checkpoint)
    prefix = "method."
    method.load_state_dict({key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)})
    return method


def load_deciles(ranking: Trial, store: Store) -> Tensor:
    """Return the decile of every training image, 1 to 10, from the record of the ranking."""
    record = store.record(ranking)
    if record is None or DECILES not in record.observed:
        raise DataError(f"the run that ranks the images is missing ({ranking.label}); run the same command again")
    return torch.tensor([int(digit) + 1 for digit in record.observed[DECILES]["of_each"]])
