"""A trial: one training and how its model is measured, with a key that names both."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from atas import attacks, methods
from atas.errors import UsageError
from atas.training import recipe as recipes

if TYPE_CHECKING:
    from atas.reproduce.observation import Observation
    from atas.reproduce.part import Part

_DIGITS = 16
LARGE = 0.15  # of the range of pixels: larger budgets are not written in grey levels


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
        part: only these training images are learnt from.
        observe: what else has to be known of it. Like attacks, it is no part of the key.
    """

    recipe: str
    values: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    attacks: tuple[str, ...] = ("pgd10", "pgd50", "autoattack")
    padding: int = 0
    examples: int | None = None
    held_out: int = 0
    part: Part | None = None
    observe: tuple[Observation, ...] = ()

    def __post_init__(self) -> None:
        for name, least in (("padding", 0), ("examples", 1), ("held_out", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise UsageError(f"{name} must be at least {least}; got {value}")
        for attack in self.attacks:
            attacks.create(attack)  # an unknown one is told now, not after the training

    @cached_property
    def settings(self) -> recipes.Recipe:
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
        settings = self.settings
        parts = [settings.data.name, settings.model.name, settings.method.name, level(settings.method.eps)]
        parts += [f"{_name(key)} {_short(value)}" for key, value in self.values.items() if _told(key)]
        parts += [] if self.part is None else [str(self.part)]
        parts += [f"seed {self.seed}"] + ([f"padded by {self.padding}"] if self.padding else [])
        return ", ".join(parts)

    @property
    def rests_on(self) -> tuple[Trial, ...]:
        """The trials whose results it needs."""
        ranked = () if self.part is None else (self.part.ranking,)
        return (*ranked, *(trial for found in self.observe for trial in found.rests_on))

    @property
    def slug(self) -> str:
        """The beginning of file names."""
        return f"{Path(self.recipe).stem}-seed{self.seed}"

    def _training(self) -> dict[str, Any]:
        part = {} if self.part is None else {"part": self.part.to_json()}
        return resolved(self.settings) | {"held_out": self.held_out} | part

    def _measured(self) -> dict[str, Any]:
        return {"padding": self.padding, "examples": self.examples}


def resolved(settings: recipes.Recipe) -> dict[str, Any]:
    """What a recipe comes to: every setting that decides the weights, also those that it leaves at their defaults.

    Two recipes that say the same in different words come to the same. How steps are run does not count, nor where; a
    precision does where it was asked for.
    """
    document = settings.to_dict()
    document["method"] = methods.settings(settings.method.name) | document["method"]
    document = recipes.deciding(document)
    if settings.engine.precision != "auto":
        document["engine"] |= {"precision": settings.engine.precision}
    plain: dict[str, Any] = json.loads(json.dumps(document, default=_plain))
    return plain


def level(eps: float) -> str:
    """A budget or a step as people write it: in grey levels, unless it is a large part of the range.

    >>> level(8/255), level(0.2)
    ('8/255', '0.2')
    """
    grey = eps < LARGE and abs(round(255 * eps) - 255 * eps) < 1e-6
    return f"{round(255 * eps)}/255" if grey else f"{eps:g}"


def _plain(value: Any) -> str:
    """Types of tensors, among defaults, by their name."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else repr(value)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:_DIGITS]


def _told(key: str) -> bool:
    """Whether a changed value is worth a word: not where things lie, nor what the label says already."""
    return key.partition(".")[0] not in ("engine", "data", "model") and key not in ("method.eps", "method.name")


def _name(key: str) -> str:
    section, _, name = key.partition(".")
    return section if name == "name" else name


def _short(value: Any) -> str:
    return level(value) if isinstance(value, float) and 0 < value < 1 else str(value)
