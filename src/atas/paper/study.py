"""A study: a named part of the paper, its trials, and its page.

`run_studies` runs several studies as one plan: a training that several of them need is run once.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from atas._utils.files import write_text
from atas.errors import UsageError, unknown
from atas.paper.measurements import default_measurements
from atas.sweeps import markdown
from atas.sweeps.plan import Failure, Plan
from atas.sweeps.progress import PlanProgress
from atas.sweeps.record import Record
from atas.sweeps.store import Store
from atas.sweeps.trial import Trial, format_eps


@dataclass(frozen=True)
class StudyOptions:
    """The options of `atas reproduce`; None leaves a choice to the study. Without `runs`, nothing is trained."""

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

    NAMES: ClassVar[tuple[str, ...]] = (
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

    def set_options(self) -> list[str]:
        """Return the names of the options that were given."""
        return [name for name in self.NAMES if getattr(self, name)]

    def restrict_to(self, names: tuple[str, ...]) -> StudyOptions:
        """Return the options with all but these at their defaults."""
        left_out = {name for name in self.set_options() if name not in names}
        return replace(self, **{own.name: _default(own) for own in fields(self) if own.name in left_out})


@dataclass(frozen=True)
class StudyResult:
    """The result of a study: its files, its page, and its failed runs."""

    files: tuple[Path, ...] = ()
    page: str = ""
    failures: tuple[str, ...] = ()


@dataclass(frozen=True)
class Page:
    """A result as Markdown and as plain values."""

    markdown: str
    content: dict[str, Any]


QUICK_NOTE = "This is the quick form, on the embedded digits and cut short: the paper has no such {}."


class Study:
    """A part of the paper that can be reproduced by name: a `TrainingStudy` or a `StandaloneStudy`."""

    accepted_options: tuple[str, ...] = ()
    """The names of `StudyOptions` that the study uses."""

    def __init__(self, name: str, about: str) -> None:
        self.name, self.about = name, about

    def file(self, options: StudyOptions, suffix: str) -> Path:
        """Return the path of a result file; quick results have other names."""
        return options.out / f"{self.name}{'-quick' if options.quick else ''}{suffix}"


class StandaloneStudy(Study, ABC):
    """A study that trains nothing."""

    @abstractmethod
    def run(self, options: StudyOptions) -> StudyResult:
        """Run the study and write its files."""


class TrainingStudy(Study, ABC):
    """A study with a plan of trials and a page made of their records."""

    accepted_options = StudyOptions.NAMES

    def prepare(self, options: StudyOptions) -> None:
        """Raise an error if the result could not be shown, before anything is trained."""

    @abstractmethod
    def trials(self, options: StudyOptions) -> list[Trial]:
        """Return the trials to run."""

    @abstractmethod
    def page(self, options: StudyOptions, store: Store) -> Page:
        """Return the page of the records in the store: of these options, and others that belong to the study."""

    def build_page(
        self,
        options: StudyOptions,
        *,
        title: str,
        preface: Sequence[str],
        body: Sequence[str],
        rows: Sequence[dict[str, Any]],
        records: Sequence[Record],
        errors: Sequence[str],
    ) -> Page:
        """Return a page in both forms: title, preface, body, and the provenance of its records.

        `preface` has a paragraph a sentence; empty ones are left out. `rows` are the body as plain values.
        """
        paragraphs = "\n\n".join(dict.fromkeys(sentence for sentence in preface if sentence))
        text = [f"# {title}", "", paragraphs, *body, *markdown.provenance_section(records, errors)]
        changed = markdown.reported_overrides(options.values)
        content = {"study": self.name, "quick": options.quick, "changed": changed, "rows": list(rows)}
        return Page("\n".join(text) + "\n", content)

    def draw(self, options: StudyOptions, store: Store) -> tuple[Path, ...]:
        """Draw the plots of the study, if it has any, and return their files; called when the plan is finished."""
        return ()

    def write(self, options: StudyOptions, store: Store) -> Page:
        """Write the page as Markdown and JSON and return it."""
        page = self.page(options, store)
        options.out.mkdir(parents=True, exist_ok=True)
        write_text(self.file(options, ".md"), page.markdown)
        write_text(self.file(options, ".json"), json.dumps(page.content, indent=1) + "\n")
        return page


def _default(own: Field[Any]) -> Any:
    return own.default if own.default_factory is MISSING else own.default_factory()


def select(what: str, names: tuple[str, ...] | None, known: tuple[str, ...], extra: tuple[str, ...] = ()) -> list[str]:
    """Return the selected names in their usual order: all `known` ones if `names` is None. `extra` may be selected."""
    for name in names or ():
        if name not in (*known, *extra):
            raise unknown(what, name, (*known, *extra))
    return list(known) if names is None else [name for name in (*known, *extra) if name in names]


def select_budgets(budgets: tuple[float, ...] | None, known: tuple[float, ...]) -> list[float]:
    """Return the selected budgets, as `select` does."""
    by_text = {format_eps(eps): eps for eps in known}
    names = None if budgets is None else tuple(map(format_eps, budgets))
    return [by_text[text] for text in select("budget", names, (*by_text,))]


def run_studies(studies: Sequence[Study], options: StudyOptions, progress: PlanProgress) -> list[StudyResult]:
    """Run what is left of the studies: the training studies as one plan, then the standalone ones.

    The page of a study is rewritten after each of its trials. Each study uses the options that it accepts. Without
    `options.runs`, only the pages are written.
    """
    _check_options(studies, options)
    planned_studies = _planned(studies, options)
    for planned in planned_studies:
        planned.study.prepare(planned.options)
    joint = _combine(planned_studies, options)

    def after_each(trial: Trial) -> None:
        for planned in planned_studies:
            if trial.key in planned.keys:
                planned.study.write(planned.options, joint.store)

    failures = joint.run(progress, after_each) if options.runs else _show_finished(joint, progress)
    reports = {planned.study.name: planned.report(joint.store, failures) for planned in planned_studies}
    reports |= {
        study.name: study.run(options.restrict_to(study.accepted_options))
        for study in studies
        if isinstance(study, StandaloneStudy)
    }
    return [reports[study.name] for study in studies]


def make_plan(studies: Sequence[Study], options: StudyOptions) -> Plan:
    """Return the plan of all training studies, with the store of their results."""
    _check_options(studies, options)
    return _combine(_planned(studies, options), options)


def _show_finished(plan: Plan, progress: PlanProgress) -> list[Failure]:
    """Log how much of a plan is done, instead of running it."""
    plan.import_records()
    done = len(plan.trials) - len(plan.remaining())
    progress.log(f"{done} of {len(plan.trials)} runs are done; missing runs are left out")
    return []


def _check_options(studies: Sequence[Study], options: StudyOptions) -> None:
    """Raise UsageError for an option that no study uses."""
    accepted = {option for study in studies for option in study.accepted_options}
    for option in options.set_options():
        if option not in accepted:
            shown = {"values": "--set and --root"}.get(option, f"--{option}")
            who = f"the study {studies[0].name} does not take" if len(studies) == 1 else "none of these studies takes"
            raise UsageError(f"{who} {shown}; leave it out")


class _PlannedStudy:
    """A study with the options that it accepts."""

    def __init__(self, study: TrainingStudy, options: StudyOptions) -> None:
        self.study, self.options = study, options
        self.trials = study.trials(options)
        self.keys = {trial.key for trial in self.trials}

    def report(self, store: Store, failures: Sequence[Failure]) -> StudyResult:
        """Write the page and the pictures and return the result."""
        page = self.study.write(self.options, store)
        files = [self.study.file(self.options, suffix) for suffix in (".md", ".json")]
        failed = [f"{fail.trial.label}: {fail.sentence}" for fail in failures if fail.trial.key in self.keys]
        return StudyResult((*files, *self.study.draw(self.options, store)), page.markdown, tuple(failed))


def _planned(studies: Sequence[Study], options: StudyOptions) -> list[_PlannedStudy]:
    return [
        _PlannedStudy(study, options.restrict_to(study.accepted_options))
        for study in studies
        if isinstance(study, TrainingStudy)
    ]


def _combine(planned_studies: Sequence[_PlannedStudy], options: StudyOptions) -> Plan:
    return Plan(
        [trial for planned in planned_studies for trial in planned.trials],
        Store(options.out, options.reuse),
        default_measurements,
    )
