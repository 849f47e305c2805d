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
GREY_LEVEL_LIMIT = 0.15  # of the range of pixels; larger budgets are written as decimals


@dataclass(frozen=True)
class Trial:
    """A recipe with overridden values, a seed, and an evaluation.

    Attributes:
        recipe: name or path of the recipe.
        values: overridden values by dotted keys.
        seed: seed of the training.
        attacks: attacks of the evaluation, besides clean images; not part of the keys.
        padding: black pixels around the evaluated images; 4 is the authors' released evaluation.
        examples: evaluate only the first N images.
        held_out: leave N training images out of the training and evaluate on them instead of the test set.
        subset: train only on these images.
        measurements: what is measured besides accuracies; not part of the keys.
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
            attacks.create(attack)  # raises for an unknown attack before the training

    @cached_property
    def resolved_recipe(self) -> recipes.Recipe:
        """The resolved recipe."""
        return recipes.load(self.recipe).with_values({**self.values, "training.seed": self.seed})

    @cached_property
    def training_key(self) -> str:
        """Hash of everything that decides the weights."""
        return _digest(self._training())

    @cached_property
    def key(self) -> str:
        """Hash of everything that decides the accuracies, except the attacks.

        Verdicts of one attack do not depend on the others, so a later evaluation adds to the same record.
        """
        return _digest(self._training() | self._measured())

    @cached_property
    def row(self) -> str:
        """The key without the seed."""
        content = self._training() | self._measured()
        content["training"] = {name: value for name, value in content["training"].items() if name != "seed"}
        return _digest(content)

    @property
    def label(self) -> str:
        """The trial in words."""
        recipe = self.resolved_recipe
        parts = [recipe.data.name, recipe.model.name, recipe.method.name, format_eps(recipe.method.eps)]
        parts += [f"{_name(key)} {_short(value)}" for key, value in self.values.items() if _in_label(key)]
        parts += [] if self.subset is None else [str(self.subset)]
        parts += [f"seed {self.seed}"] + ([f"padded by {self.padding}"] if self.padding else [])
        return ", ".join(parts)

    @property
    def depends_on(self) -> tuple[Trial, ...]:
        """The trials whose results it needs."""
        ranking = () if self.subset is None else (self.subset.ranking,)
        return (*ranking, *(trial for measurement in self.measurements for trial in measurement.depends_on))

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
    """Return every setting that decides the weights, including those that a recipe leaves at their defaults.

    Equivalent recipes give equal settings. Engine and device do not count; an explicit precision does.
    """
    document = recipe.to_dict()
    document["method"] = methods.settings(recipe.method.name, trusted=recipe.trusted) | document["method"]
    document = fingerprint.weight_keys(document)
    if recipe.engine.precision != "auto":
        document["engine"] |= {"precision": recipe.engine.precision}
    plain: dict[str, Any] = json.loads(json.dumps(document, default=_to_json))
    return plain


def format_eps(eps: float) -> str:
    """Return a budget or a step as text: in grey levels if it is small, else as a decimal.

    >>> format_eps(8/255), format_eps(0.2)
    ('8/255', '0.2')
    """
    grey = eps < GREY_LEVEL_LIMIT and abs(round(255 * eps) - 255 * eps) < 1e-6
    return f"{round(255 * eps)}/255" if grey else f"{eps:g}"


def _to_json(value: Any) -> str:
    """Return a default that JSON does not know as text; a dtype by its name."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else repr(value)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:_KEY_LENGTH]


def _in_label(key: str) -> bool:
    """Return whether a label shows a value: not paths and engine settings, nor what it shows already."""
    return key.partition(".")[0] not in ("engine", "data", "model") and key not in ("method.eps", "method.name")


def _name(key: str) -> str:
    section, _, name = key.partition(".")
    return section if name == "name" else name


def _short(value: Any) -> str:
    return format_eps(value) if isinstance(value, float) and 0 < value < 1 else str(value)


class Subset(Protocol):
    """A selection of training images by the ranking of another trial."""

    @property
    def ranking(self) -> Trial:
        """The trial that ranks the images."""

    @property
    def share(self) -> float:
        """The fraction of all training images."""

    def to_json(self) -> list[Any]:
        """Return what decides the selection; it is part of the keys of a trial."""

    def rows(self, store: Store) -> Tensor:
        """Return the indices of the images; the ranking must be done."""


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
        """The device of the model."""
        return next(self.model.parameters()).device

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """Hash of the weights, and the environment of the training."""
        return {"weights": weights_hash(self.model), "environment": self.run_folder.read_environment()}


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
        """Return callbacks that collect data during the training."""
        return []

    @abstractmethod
    def is_available(self, trial: Trial, run_folder: RunFolder) -> bool:
        """Return whether a finished training has the data that `measure` needs; if not, the training is repeated."""

    @abstractmethod
    def measure(self, training: FinishedTraining) -> dict[str, Any]:
        """Return plain values, small enough for a record."""


def unique_measurements(measurements: Iterable[Measurement]) -> tuple[Measurement, ...]:
    """Return each measurement once."""
    return tuple({measurement.identity: measurement for measurement in measurements}.values())


def missing_measurements(record: Record | None, measurements: Sequence[Measurement]) -> list[Measurement]:
    """Return the measurements that a record does not have yet."""
    return [measurement for measurement in measurements if record is None or measurement.find(record) is None]
