"""Several runs side by side: who leads and whether that is more than chance, their figures, and their curves."""

from __future__ import annotations

from atas.evaluation._names import written
from atas.report._chart import Chart, Line, Mark
from atas.report._html import Content, tag
from atas.report._ranking import Place, Ranking, rank
from atas.report._section import Section
from atas.report._subject import Subject
from atas.report._table import Cell, table
from atas.report._verdict import NOTHING, Answer
from atas.report._words import attacks_of, between, duration, listed, percent, whisker
from atas.report.sections.doubts import notes
from atas.report.sections.summary import answer_list
from atas.report.sections.training import column

_COLOURS = ("c2", "c1", "c3", "c4", "c6", "c5", "c7", "c0")
_SOLID = 4  # lines; later ones are dashed, so that colour is not all that tells them apart
_CURVES = (
    ("pgd10", "PGD-10 accuracy", "accuracy, %", 100, 1),
    ("fgsm", "FGSM accuracy", "accuracy, %", 100, 1),
    ("clean", "Clean accuracy", "accuracy, %", 100, 1),
    ("loss", "Training loss", "loss", 1, 3),
)


def summary(subjects: list[Subject]) -> Section:
    """Three answers and the table."""
    found = rank([subject.summary for subject in subjects])
    return Section("summary", "Side by side", [answer_list(_answers(subjects, found)), _table(subjects, found)])


def curves(subjects: list[Subject]) -> Section:
    """The same figure of all runs in one chart; the legends switch runs."""
    longest = max(len(subject.summary.epochs) for subject in subjects)
    marks = [
        Mark(subject.summary.collapsed_in, f"{subject.summary.name} collapses")
        for subject in subjects
        if subject.summary.collapsed_in
    ]
    charts = []
    for key, title, label, scale, digits in _CURVES:
        lines = []
        for place, subject in enumerate(subjects):
            values = column(subject.summary.epochs, key, scale)
            values += [None] * (longest - len(values))
            lines.append(Line(subject.summary.name, values, _COLOURS[place % len(_COLOURS)], dashed=place >= _SOLID))
        limits = (0, 100) if scale == 100 else (0, None)
        epochs = list(range(1, longest + 1))
        shown = marks if key == "pgd10" else []
        charts.append(
            Chart(title, "epoch", label, epochs, lines, marks=shown, limits=limits, digits=digits, sync="epochs").html()
        )
    lead = "After every epoch, on training images that the monitor attacks."
    return Section("training", "The training", [tag("p", lead), charts[0], tag("div", charts[1:], class_="pair")])


def doubts(subjects: list[Subject]) -> Section:
    """The warnings of each run."""
    rows: list[Content] = []
    for subject in subjects:
        said = [f"{caution.kind}: {caution}." for caution in subject.summary.warnings]
        said += notes(subject)
        rows.append(tag("h3", subject.summary.name))
        rows.append(tag("ul", [tag("li", text) for text in said]) if said else tag("p", "None."))
    return Section("warnings", "Warnings", rows)


def _answers(subjects: list[Subject], found: Ranking | str) -> list[Answer]:
    collapsed = [subject.summary.name for subject in subjects if subject.summary.epochs[-1]["collapsed"]]
    fallen = f" Collapsed in training: {', '.join(collapsed)}." if collapsed else ""
    which, real, trust = "Which is the most robust?", "Is its lead real?", "Can the evaluations be trusted?"
    if isinstance(found, str):
        return [
            Answer(which, "Not known", found + fallen, "care"),
            Answer(real, "Not known", "Evaluate all of them with the same attacks on the same images.", "care"),
            _trust(trust, subjects),
        ]
    best, second = found.places[:2]
    leader = (
        f"{percent(best.accuracy)}% ({between(best.known_to)}) of {best.n:,} images hold under "
        f"{listed(found.attacks)}; next is {second.run.name} with {percent(second.accuracy)}%.{_further(best)}{fallen}"
    )
    robust = any(_least(place) > NOTHING for place in found.places)
    leader = leader if robust else f"{best.run.name} leads: {leader}"
    low, high = (-100 * end for end in reversed(second.interval))
    lead = f"{-100 * second.behind:.1f} points before {second.run.name}, {low:.1f} to {high:.1f} with 95% confidence"
    larger = low > 0
    lead += ", on the same images. " + (
        "That is more than the choice of images explains" if larger else "The choice of images alone may explain that"
    )
    lead += "; what another seed would give is not in it."
    return [
        Answer(which, best.run.name if robust else "None of them", leader, "good" if robust else "bad"),
        Answer(real, "Yes, on these images" if larger else "Not shown", lead, "good" if larger else "care"),
        _trust(trust, subjects),
    ]


def _least(place: Place) -> float:
    """What holds under everything that the run was put to."""
    return place.run.evaluation.accuracy["worst"] if place.run.evaluation else place.accuracy


def _further(place: Place) -> str:
    """What attacks that not all runs were put to leave of the figure."""
    least = _least(place)
    return f" Under all attacks that it was put to itself, {percent(least)}%." if least < place.accuracy else ""


def _trust(question: str, subjects: list[Subject]) -> Answer:
    missing = [subject.summary.name for subject in subjects if subject.evaluation is None]
    warned = [subject.summary.name for subject in subjects if subject.summary.warnings]
    weak = [
        subject.summary.name for subject in subjects if subject.evaluation and not subject.evaluation.has_autoattack
    ]
    said = []
    if missing:
        said.append(f"Not evaluated: {', '.join(missing)}.")
    if warned:
        said.append(f"With warnings: {', '.join(warned)}.")
    if weak:
        said.append(f"Without AutoAttack, so an upper bound: {', '.join(weak)}.")
    if said:
        return Answer(question, "With care", " ".join(said), "care")
    return Answer(question, "Yes, as far as is known", "All ran AutoAttack, and none gave a warning.", "good")


def _table(subjects: list[Subject], found: Ranking | str) -> Content:
    runs = [subject.summary for subject in subjects]
    attacks = list(dict.fromkeys(key for run in runs if run.evaluation for key in attacks_of(run.evaluation)))
    places = {place.run.name: place for place in found.places} if isinstance(found, Ranking) else {}
    told = {  # what all have in common is said once
        "method": lambda run: run.recipe.method.name,
        "trained against": lambda run: repr(run.recipe.threat),
    }
    texts = {title: tell for title, tell in told.items() if len({tell(run) for run in runs}) > 1}
    if all(run.name == run.recipe.method.name for run in runs):
        texts.pop("method", None)
    rows: list[list[Cell | Content]] = []
    for run in runs:
        cells: list[Cell | Content] = [run.name, *(tell(run) for tell in texts.values())]
        for name in ("clean", *attacks):
            if run.evaluation is None or name not in run.evaluation.accuracy:
                cells.append(Cell("-", sort=-1))
                continue
            value, ends = run.evaluation.accuracy[name], run.evaluation.interval[name]
            cells.append(Cell([percent(value), tag("small", between(ends)), whisker(value, ends)], sort=value))
        cells.append(_behind(places.get(run.name)))
        cells.append(Cell(duration(run.seconds), sort=run.seconds))
        cells.append(Cell(run.collapse, sort=run.collapsed_in or 0))
        rows.append(cells)
    head = ["run", *texts, *map(written, ("clean", *attacks)), "to the best", "time", "collapse"]
    caption = "Accuracy in percent with 95% intervals"
    if "trained against" not in texts:
        caption += f", trained against {runs[0].recipe.threat}"
    counts = {run.evaluation.n for run in runs if run.evaluation}
    if len(counts) == 1:
        caption += f", on {counts.pop():,} test images"
    if places and isinstance(found, Ranking):
        caption += (
            f"; the difference, in points, to the best is under {listed(found.attacks)} together, on the same images"
        )
    return table(head, rows, caption=caption, texts=1 + len(texts), sortable=True, class_="runs")


def _behind(place: Place | None) -> Cell:
    if place is None:
        return Cell("-", sort=-1000)
    if place.behind == 0 and place.interval[0] == -place.interval[1]:
        return Cell("best", sort=0)
    low, high = (100 * end for end in place.interval)
    return Cell([f"{100 * place.behind:+.1f}", tag("small", f"{low:.1f} to {high:.1f}")], sort=place.behind)
