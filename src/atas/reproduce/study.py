"""A study: a named part of the paper, what is run for it, and how its result is shown."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from atas._files import write_text
from atas.errors import unknown
from atas.reproduce.store import Store
from atas.reproduce.trial import Trial, level


@dataclass(frozen=True)
class Request:
    """What a person asked for; None where it is left to the study. Without `runs` only what is known is shown."""

    out: Path
    quick: bool = False
    methods: tuple[str, ...] | None = None
    networks: tuple[str, ...] | None = None
    eps: tuple[float, ...] | None = None
    seeds: tuple[int, ...] | None = None
    attacks: tuple[str, ...] | None = None
    padding: tuple[int, ...] | None = None
    examples: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    reuse: tuple[Path, ...] = ()
    runs: bool = True
    pictures: bool = True

    OPTIONS: ClassVar[tuple[str, ...]] = (
        "methods",
        "networks",
        "eps",
        "seeds",
        "attacks",
        "padding",
        "examples",
        "values",
        "reuse",
    )

    def given(self) -> list[str]:
        """The names of the options that were given."""
        return [name for name in self.OPTIONS if getattr(self, name)]

    def only(self, options: tuple[str, ...]) -> Request:
        """Without all options but these."""
        left_out = {name for name in self.given() if name not in options}
        return replace(self, **{own.name: _default(own) for own in fields(self) if own.name in left_out})


@dataclass(frozen=True)
class Report:
    """What a study came to: files, the page to show, and what failed."""

    files: tuple[Path, ...] = ()
    page: str = ""
    failures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Page:
    """A result as people read it, in Markdown, and as programs do."""

    markdown: str
    content: dict[str, Any]


class Study:
    """Something that can be reproduced by name: a `Sweep`, or one that stands `Alone`."""

    options: tuple[str, ...] = ()
    """Those of `Request` that it understands."""

    def __init__(self, name: str, about: str) -> None:
        self.name, self.about = name, about

    def file(self, request: Request, suffix: str) -> Path:
        """A file of the study's result; quick results have names of their own."""
        return request.out / f"{self.name}{'-quick' if request.quick else ''}{suffix}"


class Alone(Study, ABC):
    """A study that trains nothing."""

    @abstractmethod
    def run(self, request: Request) -> Report:
        """Do it, and write its files."""


class Sweep(Study, ABC):
    """A study that is a plan of trials, and a page made of their records."""

    options = Request.OPTIONS

    def prepare(self, request: Request) -> None:
        """An error, before anything is trained, where the result could not be shown."""

    @abstractmethod
    def trials(self, request: Request) -> list[Trial]:
        """What has to be run."""

    @abstractmethod
    def page(self, request: Request, store: Store) -> Page:
        """What the records in the store come to, those of this request and others that belong to the study."""

    def draw(self, request: Request, store: Store) -> tuple[Path, ...]:
        """Plots of the records, where a study has any; drawn when the plan is through."""
        return ()

    def write(self, request: Request, store: Store) -> Page:
        """The page, in both forms."""
        page = self.page(request, store)
        request.out.mkdir(parents=True, exist_ok=True)
        write_text(self.file(request, ".md"), page.markdown)
        write_text(self.file(request, ".json"), json.dumps(page.content, indent=1) + "\n")
        return page


def _default(own: Field[Any]) -> Any:
    return own.default if own.default_factory is MISSING else own.default_factory()


def chosen(what: str, wanted: tuple[str, ...] | None, known: tuple[str, ...], more: tuple[str, ...] = ()) -> list[str]:
    """The wanted ones of the known, in their order; all where nothing is wanted. `more` may be wanted too."""
    for name in wanted or ():
        if name not in (*known, *more):
            raise unknown(what, name, (*known, *more))
    return list(known) if wanted is None else [name for name in (*known, *more) if name in wanted]


def chosen_budgets(wanted: tuple[float, ...] | None, known: tuple[float, ...]) -> list[float]:
    """As `chosen`, for budgets."""
    words = {level(eps): eps for eps in known}
    return [words[word] for word in chosen("budget", None if wanted is None else tuple(map(level, wanted)), (*words,))]
