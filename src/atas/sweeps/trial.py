"""A trial: one training and how its model is evaluated and measured.

Keys are hashes of everything that decides the result: `training_key` of the training alone, `key` of the training and
the evaluation, `row` of both for any seed. `Measurement` is the interface of what is measured besides accuracies,
`Subset` that of a selection of training images.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from atas import attacks, methods, recipes
from atas._utils.files import read_json
from atas.core.fingerprint import weights_hash
from atas.data import Dataset
from atas.errors import UsageError
from atas.recipes import fingerprint
from atas.training.callbacks import Callback
from atas.training.run import RunFolder

if TYPE_CHECKING:
    from atas.sweeps.record import Record
    from atas.sweeps.store import Store

_KEY_LENGTH = 16
GREY_LEVEL_LIMIT = 0.15  # of the range of pixels: larger budgets are not written in grey levels


@dataclass(frozen=True)
class Trial:
    """A recipe with some values changed, a seed, and an evaluation.

    Attributes:
        recipe: its name or path.
        values: what is changed in it, by dotted keys.
        seed: of the training.
        attacks: what the model is evaluated with, besides clean images.
        padding: black pixels around the images that it is evaluated on; 4 is the authors' released evaluation.
        examples: only the first so many images are evaluated on.
        held_out: so many training images are left out of the training, and evaluated on in place of the test set.
        subset: only these training images are learnt from.
        measurements: what else has to be known of it. Like attacks, it is no part of the key.
    """

    recipe: str
    values: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    attacks: tuple[str, ...] = ("pgd10", "pgd50", "autoattack")
    padding: int = 0
    examples: int | None = None
    held_out: int = 0
    subset: Subset | None = None
    measurements: tuple[Measurement, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("padding", 0), ("examples", 1), ("held_out", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{name} must be at least {least}; got {value}")
        for attack in self.attacks:
            attacks.create(attack)  # an unknown one is told now, not after the training

    @cached_property
    def resolved_recipe(self) -> recipes.Recipe:
        """The resolved recipe."""
        return recipes.load(self.recipe).with_values({**self.values, "training.seed": self.seed})

    @cached_property
    def training_key(self) -> str:
        """Of everything that decides the weights."""
        return _digest(self._training())

    @cached_property
    def key(self) -> str:
        """Of everything that decides the figures, but for the attacks: their verdicts do not depend on each other, so
        those of a later evaluation join those that are known."""
        return _digest(self._training() | self._measured())

    @cached_property
    def row(self) -> str:
        """As the key, for whatever seed."""
        content = self._training() | self._measured()
        content["training"] = {name: value for name, value in content["training"].items() if name != "seed"}
        return _digest(content)

    @property
    def label(self) -> str:
        """For people."""
        recipe = self.resolved_recipe
        parts = [recipe.data.name, recipe.model.name, recipe.method.name, format_eps(recipe.method.eps)]
        parts += [f"{_name(key)} {_short(value)}" for key, value in self.values.items() if _in_label(key)]
        parts += [] if self.subset is None else [str(self.subset)]
        parts += [f"seed {self.seed}"] + ([f"padded by {self.padding}"] if self.padding else [])
        return ", ".join(parts)

    @property
    def depends_on(self) -> tuple[Trial, ...]:
        """The trials whose results it needs."""
        ranked = () if self.subset is None else (self.subset.ranking,)
        return (*ranked, *(trial for found in self.measurements for trial in found.depends_on))

    @property
    def slug(self) -> str:
        """The beginning of file names."""
        return f"{Path(self.recipe).stem}-seed{self.seed}"

    def _training(self) -> dict[str, Any]:
        part = {} if self.subset is None else {"part": self.subset.to_json()}
        return training_settings(self.resolved_recipe) | {"held_out": self.held_out} | part

    def _measured(self) -> dict[str, Any]:
        return {"padding": self.padding, "examples": self.examples}


def training_settings(recipe: recipes.Recipe) -> dict[str, Any]:
    """What a recipe comes to: every setting that decides the weights, also those that it leaves at their defaults.

    Two recipes that say the same in different words come to the same. How steps are run does not count, nor where; a
    precision does where it was asked for.
    """
    document = recipe.to_dict()
    document["method"] = methods.settings(recipe.method.name) | document["method"]
    document = fingerprint.weight_keys(document)
    if recipe.engine.precision != "auto":
        document["engine"] |= {"precision": recipe.engine.precision}
    plain: dict[str, Any] = json.loads(json.dumps(document, default=_to_json))
    return plain


def format_eps(eps: float) -> str:
    """A budget or a step as people write it: in grey levels, unless it is a large part of the range.

    >>> format_eps(8/255), format_eps(0.2)
    ('8/255', '0.2')
    """
    grey = eps < GREY_LEVEL_LIMIT and abs(round(255 * eps) - 255 * eps) < 1e-6
    return f"{round(255 * eps)}/255" if grey else f"{eps:g}"


def _to_json(value: Any) -> str:
    """Types of tensors, among defaults, by their name."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else repr(value)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:_KEY_LENGTH]


def _in_label(key: str) -> bool:
    """Whether a changed value is worth a word: not where things lie, nor what the label says already."""
    return key.partition(".")[0] not in ("engine", "data", "model") and key not in ("method.eps", "method.name")


def _name(key: str) -> str:
    section, _, name = key.partition(".")
    return section if name == "name" else name


def _short(value: Any) -> str:
    return format_eps(value) if isinstance(value, float) and 0 < value < 1 else str(value)


class Subset(Protocol):
    """Some of the training images, as another trial ranked them."""

    @property
    def ranking(self) -> Trial:
        """The trial that ranks the images."""

    @property
    def share(self) -> float:
        """The fraction of all training images."""

    def to_json(self) -> list[Any]:
        """What decides which images these are; part of a trial's keys."""

    def rows(self, store: Store) -> Tensor:
        """The indices of the images; the ranking has to be done."""


@dataclass(frozen=True)
class FinishedTraining:
    """A finished training, to be measured."""

    trial: Trial
    run_folder: RunFolder
    model: nn.Module
    data: Dataset
    store: Store

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return next(self.model.parameters()).device

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """The weights and the surroundings that an observation is of."""
        return {"weights": weights_hash(self.model), "environment": read_json(self.run_folder.environment)}


class Measurement(ABC):
    """What is measured of a training besides accuracies, and saved in the record of the trial.

    Callbacks collect data during the training, if needed; `measure` runs after it. A subclass is a frozen dataclass
    whose fields are the settings. Measurements of one name with different settings are different measurements.
    """

    name: ClassVar[str]

    @property
    def settings(self) -> dict[str, Any]:
        """The fields as plain values; a trial is represented by its training key."""
        values: dict[str, Any] = (
            {own.name: getattr(self, own.name) for own in fields(self)} if is_dataclass(self) else {}
        )
        plain = {name: value.training_key if isinstance(value, Trial) else value for name, value in values.items()}
        return dict(json.loads(json.dumps(plain)))

    @property
    def stated_settings(self) -> dict[str, Any]:
        """What an entry says about its settings: nothing where all have their defaults."""
        defaults: dict[str, Any] = {own.name: own.default for own in fields(self)} if is_dataclass(self) else {}
        changed = any(getattr(self, name) != value for name, value in defaults.items())
        return {"settings": self.settings} if changed else {}

    @property
    def identity(self) -> str:
        """Name and settings."""
        return f"{self.name}-{_digest(self.settings)}"

    def find(self, record: Record) -> dict[str, Any] | None:
        """Return the entry of a record that has this measurement, or None."""
        for key in (self.name, self.identity):
            if (entry := record.observed.get(key)) is not None and self._matches(entry):
                return entry
        return None

    def record_key(self, record: Record) -> str:
        """Return the key for a new entry: the name, unless the record has it with other settings."""
        taken = record.observed.get(self.name)
        return self.name if taken is None or self._matches(taken) else self.identity

    def _matches(self, entry: dict[str, Any]) -> bool:
        if "settings" in entry:
            return bool(entry["settings"] == self.settings)
        return self.matches_unstated(entry)

    def matches_unstated(self, entry: dict[str, Any]) -> bool:
        """Return whether an entry that does not state its settings may have these.

        It has the default settings, or was written by a version that never stated them.
        """
        return True

    @property
    def depends_on(self) -> tuple[Trial, ...]:
        """The trials whose results it needs."""
        return ()

    def callbacks(self, run_folder: RunFolder) -> list[Callback]:
        """What has to look at the training."""
        return []

    @abstractmethod
    def is_available(self, trial: Trial, run_folder: RunFolder) -> bool:
        """Whether a finished training holds what `measure` needs; otherwise it is done a second time."""

    @abstractmethod
    def measure(self, training: FinishedTraining) -> dict[str, Any]:
        """Plain values, small enough for a record."""


def unique_measurements(measurements: Iterable[Measurement]) -> tuple[Measurement, ...]:
    """Return each measurement once."""
    return tuple({measurement.identity: measurement for measurement in measurements}.values())


def missing_measurements(record: Record | None, measurements: Sequence[Measurement]) -> list[Measurement]:
    """Return the measurements that a record does not have yet."""
    return [measurement for measurement in measurements if record is None or measurement.find(record) is None]
