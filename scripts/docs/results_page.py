"""Generate the page that lists every result file, by folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_INTRODUCTION = """\
# Results

The files in `results/` of the repository: small JSON files with the command, versions and hardware, and pages and
pictures made from them. The pages on [methods](methods.md), [performance](performance.md), [theory](theory.md) and
[how to read a result](reading.md) discuss them.
"""


def page(folder: Path) -> str:
    """Return the whole page as Markdown."""
    lines = [_INTRODUCTION]
    for path in [folder, *sorted(child for child in folder.iterdir() if child.is_dir())]:
        files = sorted(file for file in path.iterdir() if file.suffix in (".json", ".md", ".png"))
        if not files:
            continue
        if path != folder:
            lines += [f"## {path.name}", ""]
        lines += ["| File | Content | Device |", "|---|---|---|"]
        lines += [_row(file, file.relative_to(folder.parent).as_posix()) for file in files]
        lines.append("")
    return "\n".join(lines)


def _row(path: Path, uri: str) -> str:
    content = device = ""
    if path.suffix == ".json":
        document = json.loads(path.read_text(encoding="utf-8"))
        content = next((document[key] for key in ("what", "case", "about") if isinstance(document.get(key), str)), "")
        device = _device(document)
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
