"""The observations that the paper's figures are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from atas import methods
from atas.analysis import losses, norms, subsets, surface
from atas.analysis.snapshots import Snapshots, snapshots
from atas.augment import View
from atas.methods import Adaptive
from atas.methods.atta import Remembering
from atas.reproduce.observation import Observation, Seen
from atas.reproduce.part import TENTHS, tenths_of
from atas.reproduce.store import SNAPSHOTS
from atas.reproduce.trial import Trial
from atas.training import checkpoint
from atas.training.logs import read_metrics
from atas.training.observe import Observer
from atas.training.run import Folder, epochs_of
from atas.training.weights import load_weights

_NORMS = "norms"
_COLUMNS = ("epoch", "updates", "loss", "clean", "fgsm", "pgd10", "pgd10_loss", "step_size")


@dataclass(frozen=True)
class Curves(Observation):
    """The monitor's looks by epoch; among them the loss under PGD-10."""

    name: ClassVar[str] = "curves"

    def ready(self, trial: Trial, place: Folder) -> bool:
        """Always, but for trainings of versions that did not look at the loss."""
        rows = epochs_of(read_metrics(place.metrics)) if place.metrics.exists() else []
        return bool(rows) and all("pgd10_loss" in row for row in rows)

    def measure(self, seen: Seen) -> dict[str, Any]:
        """A list for each column; epochs count from 1."""
        rows = [row | {"epoch": row["epoch"] + 1} for row in epochs_of(read_metrics(seen.place.metrics))]
        fallen = next((row["epoch"] for row in rows if row["collapsed"]), None)
        return {name: [row[name] for row in rows] for name in _COLUMNS if name in rows[0]} | {"collapsed_in": fallen}


@dataclass(frozen=True)
class Norms(Observation):
    """Gradient norms and step sizes by epoch and tenth; of methods with adaptive steps alone."""

    name: ClassVar[str] = "norms"

    def observers(self, place: Folder) -> list[Observer]:
        """A file an epoch."""
        return [norms.EpochNorms(place.path / _NORMS)]

    def ready(self, trial: Trial, place: Folder) -> bool:
        """Whether the files are there."""
        return norms.has_norms(place.path / _NORMS, trial.settings.training.epochs)

    def measure(self, seen: Seen) -> dict[str, Any]:
        """Tails, a histogram, and the course of every tenth."""
        return norms.summary(*norms.read_norms(seen.place.path / _NORMS, seen.trial.settings.training.epochs))


@dataclass(frozen=True)
class Tenths(Norms):
    """In which tenth by gradient norm every training image is, and the shares of the classes."""

    name: ClassVar[str] = TENTHS

    def measure(self, seen: Seen) -> dict[str, Any]:
        """A digit an image, 0 for the first tenth."""
        found, _ = norms.read_norms(seen.place.path / _NORMS, seen.trial.settings.training.epochs)
        tenth = subsets.tenths(subsets.averaged(found))
        shares = subsets.class_shares(tenth, seen.data.train.labels, seen.data.num_classes)
        return {"of_each": "".join(str(number - 1) for number in tenth.tolist()), "class_shares": shares.tolist()}


@dataclass(frozen=True)
class RobustLoss(Observation):
    """The loss of the final weights on the training images under PGD-10, all of them or the first so many."""

    images: int | None = None
    name: ClassVar[str] = "robust-loss"

    def ready(self, trial: Trial, place: Folder) -> bool:
        """It needs the weights alone."""
        return True

    def measure(self, seen: Seen) -> dict[str, Any]:
        """Mean loss, its standard error, and accuracy."""
        images, labels = seen.data.train.images[: self.images], seen.data.train.labels[: self.images]
        with losses.prepared(seen.model, images) as runner:
            loss, right = losses.losses(runner, images, labels, [losses.pgd10(seen.trial.settings.threat)])
        spread = float(loss.double().std()) / len(images) ** 0.5
        return {"n": len(images), "loss": float(loss.double().mean()), "error": spread, "right": int(right.sum())}


@dataclass(frozen=True)
class StepGap(Observation):
    """How much more loss PGD-10 finds on training images than one step of each size does."""

    steps: tuple[float, ...] = ()
    images: int | None = None
    name: ClassVar[str] = "step-gap"

    def ready(self, trial: Trial, place: Folder) -> bool:
        """A method that remembers perturbations steps from them, and the last checkpoint has them."""
        return not issubclass(methods.get(trial.settings.method.name), Remembering) or place.last.exists()

    def measure(self, seen: Seen) -> dict[str, Any]:
        """The mean gap for each size: from noise, and from memory where there is one."""
        threat = seen.trial.settings.threat
        images, labels = seen.data.train.images[: self.images], seen.data.train.labels[: self.images]
        memory = _memory(seen)
        starts: dict[str, losses.Start] = {"noise": lambda x, index: losses.random_start(threat, x, index)}
        if memory is not None:
            starts["memory"] = lambda x, index: memory.recall(x, index, View.centre(len(x), memory.pad, x.device))
        steps = [losses.single_steps(threat, self.steps, start) for start in starts.values()]
        with losses.prepared(seen.model, images) as runner:
            loss, _ = losses.losses(runner, images, labels, [losses.pgd10(threat), *steps])
        found, count = losses.gaps(loss[1:], loss[0]), len(self.steps)
        gaps = {name: found[place * count :][:count] for place, name in enumerate(starts)}
        return {"n": len(images), "steps": list(self.steps), "pgd10": float(loss[0].double().mean()), "gap": gaps}


@dataclass(frozen=True)
class Surfaces(Observation):
    """The loss around images of the first and the last tenth of a ranking, at the moments around a collapse."""

    ranking: Trial
    images: int = 500
    points: int = 11
    name: ClassVar[str] = "surfaces"

    @property
    def rests_on(self) -> tuple[Trial, ...]:
        """The run that ranks."""
        return (self.ranking,)

    def observers(self, place: Folder) -> list[Observer]:
        """Weights on the way."""
        return [Snapshots(place.path / SNAPSHOTS)]

    def ready(self, trial: Trial, place: Folder) -> bool:
        """Whether there are such weights, of all moments."""
        return Snapshots(place.path / SNAPSHOTS).complete(trial.settings.training.epochs)

    def measure(self, seen: Seen) -> dict[str, Any]:
        """A grid for each moment and tenth."""
        tenth, train = tenths_of(self.ranking, seen.store), seen.data.train
        rows = {number: subsets.members(tenth, number, number)[: self.images] for number in (1, subsets.PARTS)}
        model = load_weights(seen.place.model).to(seen.device)
        moments = []
        for shot in snapshots(seen.place.path / SNAPSHOTS):
            shot.into(model)
            grids = {
                str(number): surface.loss_surface(
                    model, train.images[part], train.labels[part], seen.trial.settings.threat, self.points
                )
                for number, part in rows.items()
            }
            moments.append(
                {"step": shot.step} | {name: [norms.rounded(row) for row in grid] for name, grid in grids.items()}
            )
        batch = seen.trial.settings.training.batch_size
        return {"n": len(rows[1]), "steps_an_epoch": -(-len(train) // batch), "moments": moments}


def usual(trial: Trial) -> tuple[Observation, ...]:
    """What costs next to nothing to observe, and so is observed in every training of a study."""
    adaptive = issubclass(methods.get(trial.settings.method.name), Adaptive)
    return (Curves(), Norms()) if adaptive else (Curves(),)


def _memory(seen: Seen) -> Remembering | None:
    """The method with what it remembered at the end of the training; None for one that remembers nothing."""
    settings, train = seen.trial.settings, seen.data.train
    if not issubclass(methods.get(settings.method.name), Remembering):
        return None
    shape, pad = train.images.shape[1:], settings.data.pad
    found = methods.create(
        settings.method.name,
        settings.threat,
        len(train),
        shape,
        pad=pad,
        device=seen.device,
        **settings.method.settings,
    )
    assert isinstance(found, Remembering)
    tensors, _ = checkpoint.load(seen.place.last)
    prefix = "method."
    found.load_state_dict({key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)})
    return found
