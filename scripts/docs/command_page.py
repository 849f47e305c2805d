"""Generate the page of the command `atas` from the `--help` of its sub-commands."""

from __future__ import annotations

import contextlib
import io
import os
import re
from dataclasses import dataclass, field

import typer.main

from atas.cli import app

_HEADINGS = ("Arguments:", "Options:", "Commands:")
_USUAL = ("--help", "-h, --help")  # every command has it, so no table does


@dataclass(frozen=True)
class Help:
    """The parsed help of one command."""

    usage: str
    about: str
    examples: list[str] = field(default_factory=list)
    tables: dict[str, list[tuple[str, str]]] = field(default_factory=dict)


def page() -> str:
    """Return the whole page as Markdown."""
    top = read(help_of())
    lines = [
        "# The command",
        "",
        top.about,
        "",
        "This page is generated from `atas --help` and `--help` of each command. The exit status is 0, 1 (failed) or 2 "
        "(wrong use). [In other programs](../export.md#the-command-in-other-programs): JSON, colours, completion.",
        "",
    ]
    for name, _ in top.tables["Commands:"]:
        lines += section(name)
    lines += ["## atas", "", *table("Option", top.tables["Options:"])]
    return "\n".join(lines)


def section(*path: str) -> list[str]:
    """Return the lines for a command and its sub-commands."""
    found = read(help_of(*path))
    lines = [f"{'#' * (len(path) + 1)} atas {' '.join(path)}", "", as_code(found.about), ""]
    if "Commands:" in found.tables:
        for name, _ in found.tables["Commands:"]:
            lines += section(*path, name)
        return lines
    lines += ["```text", found.usage, "```", ""]
    for heading, column in (("Arguments:", "Argument"), ("Options:", "Option")):
        lines += table(column, found.tables.get(heading, []))
    return [*lines, "For example:", "", "```sh", *found.examples, "```", ""]


def table(column: str, rows: list[tuple[str, str]]) -> list[str]:
    """Return a Markdown table of names and meanings, or nothing if there are none."""
    rows = [(name, meaning) for name, meaning in rows if name not in _USUAL]
    if not rows:
        return []
    cells = [f"| `{name}` | {as_code(meaning).replace('<', '&lt;')} |" for name, meaning in rows]
    return [f"| {column} | Meaning |", "|---|---|", *cells, ""]


def as_code(text: str) -> str:
    """Return a text with the options that are not code yet as code.

    >>> as_code("--a of `x --b`")
    '`--a` of `x --b`'
    """
    return re.sub(r"`[^`]*`|(?<![\w-])--[a-z](?:[\w.=-]*\w)?", lambda part: f"`{part[0].strip('`')}`", text)


def help_of(*path: str) -> str:
    """Return the output of `atas PATH --help`."""
    printed = io.StringIO()
    before = {key: os.environ.get(key) for key in ("NO_COLOR", "COLUMNS", "TERMINAL_WIDTH")}
    os.environ.update(NO_COLOR="1", COLUMNS="80", TERMINAL_WIDTH="80")
    try:
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            typer.main.get_command(app).main(args=[*path, "--help"], prog_name="atas")
    finally:
        for key, value in before.items():
            os.environ.pop(key) if value is None else os.environ.__setitem__(key, value)
    return printed.getvalue()


def read(text: str) -> Help:
    """Take a help text apart."""
    usage, _, rest = text.strip().partition("\n\n")
    body, tables, heading = [], {}, None
    for line in rest.splitlines():
        if line in _HEADINGS:
            heading = line
            tables[heading] = []
        elif heading is None:
            body.append(line.strip())
        elif line.startswith("  ") and line[2:3].strip():
            name, _, meaning = line.strip().partition("  ")
            name = re.sub(r" <list\[\w+\]>$", "", name)  # a type of Python
            tables[heading].append((name, meaning.strip()))
        elif line.strip():
            name, meaning = tables[heading].pop()
            space = "" if re.search(r"\w-$", meaning) else " "  # a line may end inside of a word such as one-step
            tables[heading].append((name, f"{meaning}{space}{line.strip()}".strip()))
    about, _, examples = "\n".join(body).partition("Example: ")
    return Help(
        usage=re.sub(r"\s+", " ", usage.removeprefix("Usage: ")).replace("...]...", "]..."),
        about=about.strip(),
        examples=[line for line in examples.splitlines() if line],
        tables=tables,
    )
