"""The page that lists what was measured: every result file, by folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_INTRODUCTION = """\
# Results

Files of what was measured, as they lie in `results/` of the repository: small JSON with the command, versions and
hardware, and pages and pictures made from them. What they say is told on the pages on [methods](methods.md),
[performance](performance.md), [theory](theory.md) and [how to read a result](reading.md).
"""


def page(folder: Path) -> str:
    """The whole page as Markdown."""
    lines = [_INTRODUCTION]
    for place in [folder, *sorted(path for path in folder.iterdir() if path.is_dir())]:
        files = sorted(path for path in place.iterdir() if path.suffix in (".json", ".md", ".png"))
        if not files:
            continue
        if place != folder:
            lines += [f"## {place.name}", ""]
        lines += ["| File | What | Device |", "|---|---|---|"]
        lines += [_row(path, path.relative_to(folder.parent).as_posix()) for path in files]
        lines.append("")
    return "\n".join(lines)


def _row(path: Path, uri: str) -> str:
    what = device = ""
    if path.suffix == ".json":
        document = json.loads(path.read_text(encoding="utf-8"))
        what = next((document[key] for key in ("what", "case", "about") if isinstance(document.get(key), str)), "")
        device = _device(document)
    return f"| [{path.name}]({uri}) | {what} | {device} |"


def _device(value: Any) -> str:
    """The first hardware that is named anywhere in a document."""
    if isinstance(value, dict):
        named = value.get("device", value.get("hardware"))
        inner: Any = value.values()
        if isinstance(named, str) and named != "auto":
            return named
    else:
        inner = value if isinstance(value, list) else ()
    return next(filter(None, map(_device, inner)), "")
