"""Studies carried out together, as one plan: what several of them need is trained once, and observed for all."""

from __future__ import annotations

from collections.abc import Sequence

from atas.errors import UsageError
from atas.reproduce.plan import Failure, Plan
from atas.reproduce.progress import PlanProgress
from atas.reproduce.store import Store
from atas.reproduce.study import Alone, Report, Request, Study, Sweep
from atas.reproduce.trial import Trial


def run(studies: Sequence[Study], request: Request, progress: PlanProgress) -> list[Report]:
    """Do the studies, or what is left of them: sweeps as one plan, whose pages are written anew after every trial of
    theirs, then those that stand alone. Each heeds the options that it takes. Without `request.runs`, the pages show
    what is known, and nothing else is done."""
    _check(studies, request)
    parts = _parts(studies, request)
    for part in parts:
        part.sweep.prepare(part.request)
    joint = _joint(parts, request)

    def after_each(trial: Trial) -> None:
        for part in parts:
            if trial.key in part.keys:
                part.sweep.write(part.request, joint.store)

    failures = joint.run(progress, after_each) if request.runs else _known(joint, progress)
    reports = {part.sweep.name: part.report(joint.store, failures) for part in parts}
    reports |= {study.name: study.run(request.only(study.options)) for study in studies if isinstance(study, Alone)}
    return [reports[study.name] for study in studies]


def joint_plan(studies: Sequence[Study], request: Request) -> Plan:
    """The trials of all sweeps among them, with the store that results go to."""
    _check(studies, request)
    return _joint(_parts(studies, request), request)


def _known(plan: Plan, progress: PlanProgress) -> list[Failure]:
    """Instead of running a plan: say how much of it is done."""
    plan.adopt()
    done = len(plan.trials) - len(plan.left())
    progress.say(f"{done} of {len(plan.trials)} runs are done; what is missing is left out")
    return []


def _check(studies: Sequence[Study], request: Request) -> None:
    """An error for an option that would not be heeded."""
    taken = {option for study in studies for option in study.options}
    for option in request.given():
        if option not in taken:
            shown = {"values": "--set and --root"}.get(option, f"--{option}")
            who = f"the study {studies[0].name} does not take" if len(studies) == 1 else "none of these studies takes"
            raise UsageError(f"{who} {shown}; leave it out")


class _Part:
    """A sweep with what of the request is for it."""

    def __init__(self, sweep: Sweep, request: Request) -> None:
        self.sweep, self.request = sweep, request
        self.trials = sweep.trials(request)
        self.keys = {trial.key for trial in self.trials}

    def report(self, store: Store, failures: Sequence[Failure]) -> Report:
        """Its page, its pictures, and what failed of it."""
        page = self.sweep.write(self.request, store)
        files = [self.sweep.file(self.request, suffix) for suffix in (".md", ".json")]
        failed = [f"{fail.trial.label}: {fail.sentence}" for fail in failures if fail.trial.key in self.keys]
        return Report((*files, *self.sweep.draw(self.request, store)), page.markdown, tuple(failed))


def _parts(studies: Sequence[Study], request: Request) -> list[_Part]:
    return [_Part(study, request.only(study.options)) for study in studies if isinstance(study, Sweep)]


def _joint(parts: Sequence[_Part], request: Request) -> Plan:
    return Plan([trial for part in parts for trial in part.trials], Store(request.out, request.reuse))
