"""Generate the page of results as tables and figures, and the page that lists every result file by folder."""

from __future__ import annotations

import json
import re
from itertools import groupby
from pathlib import Path
from statistics import mean
from typing import Any

_INTRODUCTION = """\
# Results

Tables and figures of the measurements in the repository, made from their files.

[What the paper claims and what was measured](results/README.md) compares these results with the paper and gives reasons
for differences. [Reproducing](reproducing.md) has the commands. [The result files](results-files.md) hold command,
versions, hardware and seed of every run.
"""
_LEGEND = """\
Accuracy is in percent of all 10,000 test images. Rows are sorted by AutoAttack. A row shows one run with its 95%
interval in square brackets, or the mean over several seeds with their range in round brackets. "Paper" is what the ATAS
paper reports under AutoAttack. "Time" is the time of the training on one H200; a dash means that it was not measured.
"""
_HEAD = (
    "| Method | Clean | PGD-10 | PGD-50 | AutoAttack | Paper | Seeds | Time | Collapse |",
    "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
)
_DATA = {"cifar10/table-cifar10": "CIFAR-10", "cifar100/table-cifar100": "CIFAR-100"}
_NETWORKS = {"preact-resnet18": "PreActResNet-18", "wrn-28-10": "WRN-28-10"}
_TABLE = re.compile(r"^\|.*\n(?:\|.*\n)+", re.MULTILINE)
# Pages of `results/` that are shown up to their first table.
_EXCERPTS = ("imagenette/README.md", "digits/README.md", "autoattack/README.md", "record/README.md")

_FILES_INTRODUCTION = """\
# Result files

All files in `results/` of the repository, by folder: JSON files with command, versions and hardware, and the pages and
pictures made from them. [Results](results.md) has the tables.
"""


def page(folder: Path) -> str:
    """Return the page of results as Markdown."""
    lines = [_INTRODUCTION, "## CIFAR-10 and CIFAR-100", "", _LEGEND]
    for name, data in _DATA.items():
        document = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        lines += tables(document["rows"], data, f"results/{name}.md")
    lines += speed(folder.parent / "docs" / "performance.md")
    for name in _EXCERPTS:
        lines += excerpt(folder / name, f"results/{name}")
    lines += ["## Figures", ""]
    for path in sorted((folder / "cifar10").glob("figure-*.md")):
        lines += figure(path, f"results/cifar10/{path.name}")
    lines += figure(folder / "theory" / "theory.md", "results/theory/theory.md")
    return "\n".join(lines)


def tables(rows: list[dict[str, Any]], data: str, uri: str) -> list[str]:
    """Return a table for each network and budget of a study, the most robust method first."""
    lines = []
    usual = [row for row in rows if row["padding"] == 0 and "autoattack" in row["ours"]]
    for (network, eps), group in groupby(usual, key=lambda row: (row["network"], row["eps"])):
        lines += [f"### {data}, {_NETWORKS[network]}, eps {eps}", "", *_HEAD]
        lines += [_row(row) for row in sorted(group, key=lambda row: -row["ours"]["autoattack"]["percent"])]
        lines += ["", f"Differences to the paper in every column: [{data}]({uri}).", ""]
    return lines


def _row(row: dict[str, Any]) -> str:
    ours, paper = row["ours"], row["paper"] or {}
    figures = [_accuracy(ours[attack]) for attack in ("clean", "pgd10", "pgd50", "autoattack")]
    seconds = [value for value in row["training_seconds"] if value is not None]
    printed = f"{paper['autoattack']:.1f}" if paper.get("autoattack") is not None else "-"
    cells = [f"`{row['method']}`", *figures, printed, str(len(row["seeds"])), _time(seconds), _collapse(row)]
    return f"| {' | '.join(cells)} |"


def _accuracy(figure: dict[str, Any]) -> str:
    low, high = figure["low"], figure["high"]
    spread = f"[{low:.1f}, {high:.1f}]" if figure["runs"] == 1 else f"({low:.1f} to {high:.1f})"
    return f"{figure['percent']:.1f} {spread}"


def _time(seconds: list[float]) -> str:
    return f"{mean(seconds):.0f} s" if seconds else "-"


def _collapse(row: dict[str, Any]) -> str:
    epochs = [str(epoch) for epoch in row["collapsed_in_epoch"] if epoch is not None]
    runs = len(row["collapsed_in_epoch"])
    if not epochs:
        return "no"
    return f"epoch {', '.join(epochs)}" + (f" ({len(epochs)} of {runs} seeds)" if runs > 1 else "")


def excerpt(path: Path, uri: str) -> list[str]:
    """Return a page up to the end of its first table, with a link to the rest."""
    text = path.read_text(encoding="utf-8")
    table = _TABLE.search(text)
    assert table is not None, path
    shown = re.sub(r"^#", "##", text[: table.end()], flags=re.MULTILINE)
    shown = re.sub(r"\]\((?!\w+:)", f"]({uri.rpartition('/')[0]}/", shown)
    return [shown, f"More: [{_title(text)}]({uri}).", ""]


def speed(path: Path) -> list[str]:
    """Return the table of whole trainings on the page about performance."""
    table = _TABLE.search(path.read_text(encoding="utf-8"))
    assert table is not None, path
    protocol = "Range over seeds in brackets; protocol, and times of evaluations: [performance](performance.md)."
    return ["## Speed", "", table[0], protocol, ""]


def figure(path: Path, uri: str) -> list[str]:
    """Return the heading and the picture of a page, with a link to it."""
    title = _title(path.read_text(encoding="utf-8"))
    picture = uri.removesuffix(".md") + ".png"
    link = f"Explanation and figures as a table: [{title}]({uri})."
    return [f"### {title}", "", f"![{title}]({picture})", "", link, ""]


def _title(text: str) -> str:
    return text.partition("\n")[0].removeprefix("# ")


def files_page(folder: Path) -> str:
    """Return the page that lists every result file as Markdown."""
    lines = [_FILES_INTRODUCTION]
    for path in [folder, *sorted(child for child in folder.iterdir() if child.is_dir())]:
        files = sorted(file for file in path.iterdir() if file.suffix in (".json", ".md", ".png"))
        if path != folder:
            lines += [f"## {path.name}", ""]
        if files:
            lines += ["| File | Content | Device |", "|---|---|---|"]
            lines += [_file_row(file, file.relative_to(folder.parent).as_posix()) for file in files]
            lines.append("")
        for child in sorted(inner for inner in path.iterdir() if inner.is_dir() and path != folder):
            count = sum(file.is_file() for file in child.rglob("*"))
            lines += [f"`{child.name}/`: {count} {'file' if count == 1 else 'files'}.", ""]
    return "\n".join(lines)


def _file_row(path: Path, uri: str) -> str:
    content = device = ""
    if path.suffix == ".json":
        document = json.loads(path.read_text(encoding="utf-8"))
        content = next((document[key] for key in ("what", "case", "about") if isinstance(document.get(key), str)), "")
        device = _device(document)
    elif path.suffix == ".md":
        content = _title(path.read_text(encoding="utf-8"))
    return f"| [{path.name}]({uri}) | {content} | {device} |"


def _device(value: Any) -> str:
    """Return the first hardware named anywhere in a document."""
    if isinstance(value, dict):
        named = value.get("device", value.get("hardware"))
        inner: Any = value.values()
        if isinstance(named, str) and named != "auto":
            return named
    else:
        inner = value if isinstance(value, list) else ()
    return next(filter(None, map(_device, inner)), "")
