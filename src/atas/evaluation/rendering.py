"""A result as text: a plain table, a coloured table, a page of Markdown, and a sentence for a paper."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from atas._utils.formatting import markdown_code, markdown_text, printable
from atas.attacks.registry import display_name, is_pgd
from atas.evaluation.intervals import wilson
from atas.threat import format_pixels

if TYPE_CHECKING:
    from atas.evaluation.result import Evaluation


HEADER = ("attack", "accuracy", "95% interval", "robust", "time", "queries/image")
_TARGETED_HEADER = ("attack", "not pushed to the target", *HEADER[2:])


def header(result: Evaluation) -> tuple[str, ...]:
    """Return the headings of the columns; with target classes the figure is no accuracy."""
    return _TARGETED_HEADER if result.targeted else HEADER


def table_rows(result: Evaluation) -> list[tuple[str, ...]]:
    """Return one row of text per attack, followed by one for each of its stages."""
    return [row for name in result.correct for row in attack_rows(result, name)]


def attack_rows(result: Evaluation, name: str) -> list[tuple[str, ...]]:
    """Return the row of an attack and the rows of its stages."""
    num_correct, seconds, queries = int(result.correct[name].sum()), result.seconds[name], result.queries.get(name)
    rows = [(name, *_measured(num_correct, result.n, seconds, queries))]
    for stage in result.stages.get(name, ()):
        rows.append((f"  after {stage.name}", *_measured(stage.num_correct, result.n, stage.seconds, stage.queries)))
    return rows


def _measured(num_correct: int, n: int, seconds: float, queries: int | None) -> tuple[str, ...]:
    return *accuracy_cells(num_correct, n), f"{seconds:.1f} s", "-" if queries is None else f"{queries / n:,.0f}"


def accuracy_cells(num_correct: int, n: int) -> tuple[str, str, str]:
    """Return an accuracy, its interval and its count as text.

    >>> accuracy_cells(50, 100)
    ('50.00%', '40.38% to 59.62%', '50/100')
    """
    low, high = wilson(num_correct, n)
    return f"{100 * num_correct / n:.2f}%", f"{100 * low:.2f}% to {100 * high:.2f}%", f"{num_correct}/{n}"


def rich_table(result: Evaluation) -> Table:
    """Return a table for a terminal."""
    table = Table(title=caption(result), box=box.SIMPLE, padding=(0, 1, 0, 0))
    for heading in header(result):
        table.add_column(heading, justify="left" if heading == HEADER[0] else "right", no_wrap=heading == "time")
    for row in table_rows(result):
        table.add_row(*(Text(printable(cell)) for cell in row))  # a name with brackets is not markup
    return table


def corruption_rows(result: Evaluation, cell: str = "{:.1f}% ({:.1f} to {:.1f})") -> list[tuple[str, ...]]:
    """Return the headings, and for each corruption one row with a `cell` for each severity: accuracy and interval."""
    severities = max(map(len, result.corruptions.values()), default=0)
    rows = [("corruption", *(f"severity {number + 1}" for number in range(severities)))]
    for name, counts in result.corruptions.items():
        shares = [(count / result.n, *wilson(count, result.n)) for count in counts]
        rows.append((name, *(cell.format(*(100 * share for share in three)) for three in shares)))
    return rows


def corruption_table(result: Evaluation) -> Table:
    """Return a table of the accuracies under common corruptions for a terminal."""
    heading, *rows = corruption_rows(result, "{:.1f}%\n{:.1f}-{:.1f}")  # columns as narrow as their headings
    title = f"common corruptions, {result.n} examples, with 95% intervals"
    table = Table(title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for position, name in enumerate(heading):
        table.add_column(name, justify="right" if position else "left")
    for row in rows:
        table.add_row(*row)
    return table


def plain_table(result: Evaluation) -> str:
    """Return a table as plain text."""
    text = [caption(result), *_aligned([header(result), *table_rows(result)])]
    if result.corruptions:
        text += ["", *_aligned(corruption_rows(result))]
    return "\n".join(text)


def _aligned(lines: list[tuple[str, ...]]) -> list[str]:
    """Return lines of cells as text in columns."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return [
        "  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    ]


def caption(result: Evaluation) -> str:
    """Return the threat model, the number of examples, the targets and the precision."""
    return f"{result.threat}{_mask(result)}, {result.n} examples{_targets(result)}, {result.protocol['precision']}"


def _mask(result: Evaluation) -> str:
    """Return how many pixels might change."""
    mask = result.protocol.get("mask")
    return f" on {100 * mask['share']:.4g}% of the pixels" if isinstance(mask, dict) else ""


def _targets(result: Evaluation) -> str:
    """Return which classes the attacks pushed the images to."""
    targets = result.protocol.get("targets")
    if not isinstance(targets, dict):
        return ""
    if "class" not in targets:
        return ", a target class per example"
    return f", target class {targets['class']} (its {targets.get('left_out', 0)} own images left out)"


def markdown(result: Evaluation) -> str:
    """Return a page with the table, the warnings, the sentence for a paper, and the protocol."""
    protocol, environment = result.protocol, result.environment
    lines = [
        f"# Evaluation: {markdown_text(caption(result))}",
        "",
        _markdown_row(header(result)),
        _markdown_row(["---", *["---:"] * (len(HEADER) - 1)]),
    ]
    for name in result.correct:
        first, *stages = attack_rows(result, name)
        # Markdown drops the indentation that marks stages in the other tables, so name the attack too.
        lines += [
            _markdown_row(first),
            *(_markdown_row([f"{name}, {label.strip()}", *cells]) for label, *cells in stages),
        ]
    if result.corruptions:
        heading, *rows = corruption_rows(result)
        rule = ["---", *["---:"] * (len(heading) - 1)]
        lines += ["", _markdown_row(heading), _markdown_row(rule), *(_markdown_row(row) for row in rows)]
    lines += ["", "Warnings:" if result.warnings else "No warnings."]
    lines += [f"- {markdown_text(warning)}" for warning in result.warnings]
    lines += ["", f"> {markdown_text(result.sentence())}", ""]
    for name, value in {
        "verdict": protocol.get("verdict"),
        "search in": protocol.get("search_precision"),
        "note": "; ".join(protocol.get("search_notes", [])),
        "image shape": protocol.get("image_shape"),
        "command": markdown_code(environment["command"]) if "command" in environment else None,
        "versions": ", ".join(f"{key} {environment[key]}" for key in ("atas", "torch", "python") if key in environment),
        "hardware": environment.get("device"),
        "processes": protocol.get("processes"),
        "date": environment.get("date"),
    }.items():
        if value:
            lines.append(f"- {name}: {value if name == 'command' else markdown_text(value)}")
    attacks = {name: settings for name, settings in protocol.get("attacks", {}).items() if settings}
    lines += [f"- {markdown_text(name)}: {markdown_text(_settings(settings))}" for name, settings in attacks.items()]
    return "\n".join(lines) + "\n"


def _markdown_row(cells: list[str] | tuple[str, ...]) -> str:
    return f"| {' | '.join(markdown_text(cell.replace('|', '/')) for cell in cells)} |"


def _settings(settings: dict[str, object]) -> str:
    """Return settings in a line, with the settings of stages in brackets."""
    return ", ".join(
        f"{key} ({_settings(value)})" if isinstance(value, dict) else f"{key} {value}"
        for key, value in settings.items()
    )


def sentence(result: Evaluation) -> str:
    """Return accuracies with intervals, the threat model, and the settings to reproduce them."""
    norm = {"linf": "L-infinity", "l2": "L2"}.get(result.threat.name, result.threat.name)
    eps = str(result.threat).partition("(")[2].rstrip(")")
    lowest = min(accuracy for name, accuracy in result.accuracy.items() if name != "worst")
    names = [name for name in result.correct if name != "worst" or result.accuracy[name] < lowest]
    accuracies = ", ".join(f"{display_name(name)} {_accuracy(result, name)}" for name in names)
    warnings = f"; with warnings ({', '.join(warning.kind for warning in result.warnings)})" if result.warnings else ""
    settings = result.protocol.get("attacks", {})
    sizes = {
        _step(settings[name]["step_size_value"], result.threat.eps)
        for name in filter(is_pgd, settings)
        if "step_size_value" in settings[name]  # an attack of the user's own may have the name of a PGD
    }
    steps = f", PGD in steps of {' and '.join(sorted(sizes))}" if sizes else ""
    measured = "Images not pushed to the target" if result.targeted else "Accuracy"
    return (
        f"{measured} in percent with 95% intervals: {accuracies}; {norm}, eps = {eps}{_mask(result)}{steps}, "
        f"{result.n:,} images{_targets(result)}, verdicts in {result.protocol.get('precision', 'float32')}, "
        f"seed {result.protocol.get('seed', 0)}, atas {result.environment.get('atas', '?')}, "
        f"weights {result.weights}, data {result.data}{warnings}."
    )


def _accuracy(result: Evaluation, name: str) -> str:
    low, high = (100 * end for end in result.interval[name])
    return f"{100 * result.accuracy[name]:.2f} ({low:.2f} to {high:.2f})"


def _step(size: float, eps: float) -> str:
    """Return a step size as a fraction of eps if that is eps/n, else in pixel units.

    >>> _step(8 / 255 / 5, 8 / 255), _step(3 / 255, 8 / 255), _step(0.01, 8 / 255)
    ('eps/5', '3/255', '0.01')
    """
    divisor = round(eps / size) if size else 0
    return f"eps/{divisor}" if divisor and abs(divisor * size - eps) < 1e-6 * eps else format_pixels(size)
