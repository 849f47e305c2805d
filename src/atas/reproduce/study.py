"""A study: a named part of the paper, what is run for it, and how its result is shown."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from atas._files import write_text
from atas.errors import UsageError, unknown
from atas.reproduce.plan import Plan
from atas.reproduce.progress import PlanProgress
from atas.reproduce.store import Store
from atas.reproduce.trial import Trial, level


@dataclass(frozen=True)
class Request:
    """What a person asked for; None where it is left to the study."""

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


class Study(ABC):
    """Something that can be reproduced by name."""

    options: tuple[str, ...] = ()
    """Those of `Request` that it understands."""

    def __init__(self, name: str, about: str) -> None:
        self.name, self.about = name, about

    def check(self, request: Request) -> None:
        """An error for an option that would not be heeded."""
        for option in request.given():
            if option not in self.options:
                shown = {"values": "--set and --root"}.get(option, f"--{option}")
                raise UsageError(f"the study {self.name} does not take {shown}; leave it out")

    @abstractmethod
    def run(self, request: Request, progress: PlanProgress) -> Report:
        """Do it, or what is left of it, and write its files."""

    def file(self, request: Request, suffix: str) -> Path:
        """A file of the study's result; quick results have names of their own."""
        return request.out / f"{self.name}{'-quick' if request.quick else ''}{suffix}"


class Sweep(Study):
    """A study that is a plan of trials, and a page made of their records."""

    options = Request.OPTIONS

    @abstractmethod
    def trials(self, request: Request) -> list[Trial]:
        """What has to be run."""

    @abstractmethod
    def page(self, request: Request, store: Store) -> Page:
        """What the records in the store come to, those of this request and others that belong to the study."""

    def draw(self, request: Request, store: Store) -> tuple[Path, ...]:
        """Plots of the records, where a study has any; drawn when the plan is through."""
        return ()

    def plan(self, request: Request) -> Plan:
        """The trials with the store that their results go to."""
        self.check(request)
        return Plan(self.trials(request), Store(request.out, request.reuse))

    def run(self, request: Request, progress: PlanProgress) -> Report:
        """Carry out the plan; the page is written anew after every trial."""
        plan = self.plan(request)
        failures = plan.run(progress, lambda: self._write(request, plan.store))
        page = self._write(request, plan.store)
        files = self.file(request, ".md"), self.file(request, ".json"), *self.draw(request, plan.store)
        return Report(files, page.markdown, tuple(f"{fail.trial.label}: {fail.sentence}" for fail in failures))

    def _write(self, request: Request, store: Store) -> Page:
        page = self.page(request, store)
        request.out.mkdir(parents=True, exist_ok=True)
        write_text(self.file(request, ".md"), page.markdown)
        write_text(self.file(request, ".json"), json.dumps(page.content, indent=1) + "\n")
        return page


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
