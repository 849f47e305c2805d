"""What is done while the site is built: pages that are made from the code, and links to files of the repository.

Nothing that is made here is kept in the repository; the page of recipes, which is read there too, is written by
`recipe_page.py`. Pages under `docs/` link to other files of the repository as they
would on any host, `../results/theory`; such files become part of the site, and folders lead to their list.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

import command_page
import results_page
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent.parent
MADE = {
    "reference/command.md": command_page.page,
    "results.md": lambda: results_page.page(ROOT / "results"),
}
# Files of the repository that are pages of the site, and what is shown or read as it is.
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
AS_THEY_ARE = ("results/**/*.png", "results/**/*.json", "examples/*.py", "benchmarks/*.py", "LICENSE", "CITATION.cff")
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made, and what lies beside `docs/`."""
    for uri, make in MADE.items():
        files.append(File.generated(config, uri, content=make()))
    for source, uri in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / source)))
    for path in (ROOT / "results").rglob("*.md"):
        uri = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    for pattern in AS_THEY_ARE:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: Any) -> str:
    """Lead links to files of the repository to their places in the site."""
    uri = page.file.src_uri
    source = next((name for name, place in PAGES.items() if place == uri), None)
    if source is None:
        source = uri if uri.startswith("results/") else posixpath.join("docs", uri)

    def lead(match: re.Match[str]) -> str:
        opening, target, anchor, closing = match.groups()
        if re.match(r"[a-z]+:", target):
            return match[0]
        found = place_of(posixpath.normpath(posixpath.join(posixpath.dirname(source), target)), files)
        if found is None:
            return match[0]  # the build says so
        place, own = found
        return f"{opening}{posixpath.relpath(place, posixpath.dirname(uri) or '.')}{anchor or own}{closing}"

    return _LINK.sub(lead, markdown)


def place_of(path: str, files: Files) -> tuple[str, str] | None:
    """Where a path of the repository is in the site, with the anchor that it needs; None where it is not."""
    place = PAGES.get(path, path.removeprefix("docs/"))
    if path == "README.md":
        place = "index.md"
    if files.get_file_from_path(place) is not None:
        return place, ""
    if path.startswith("results") and (ROOT / path).is_dir():
        return "results.md", "" if path == "results" else f"#{os.path.basename(path)}"
    return None
