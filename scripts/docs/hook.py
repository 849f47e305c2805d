"""Hook of MkDocs: generate pages from the code, and add linked files of the repository to the site.

README.md is the home page, so the two are always equal. Generated pages are not kept in the repository, except for the
page of recipes, which `recipe_page.py` writes. Pages under `docs/` link to other files of the repository by relative
paths, such as `../results/theory`. Those files become part of the site, and links to folders lead to the list of files.
"""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

import command_page
import results_page
import search_index
import small_screens
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent.parent
GENERATED = {
    "reference/command.md": command_page.page,
    "results.md": lambda: results_page.page(ROOT / "results"),
    "results-files.md": lambda: results_page.files_page(ROOT / "results"),
}
# Files of the repository that become pages of the site, and files that are copied.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
COPIED = (
    *("results/**/*.png", "results/**/*.json", "examples/*.py", "examples/*.ipynb", "benchmarks/*.py"),
    *("LICENSE", "CITATION.cff"),
)
_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, and files outside of `docs/`."""
    for uri, make in GENERATED.items():
        files.append(File.generated(config, uri, content=make()))
    for source, uri in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / source)))
    for path in (ROOT / "results").rglob("*.md"):
        uri = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    for pattern in COPIED:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: Any) -> str:
    """Rewrite links to files of the repository into links within the site."""
    uri = page.file.src_uri
    source = next((name for name, page_uri in PAGES.items() if page_uri == uri), None)
    if source is None:
        source = uri if uri.startswith("results/") else posixpath.join("docs", uri)

    def rewrite(match: re.Match[str]) -> str:
        opening, target, anchor, closing = match.groups()
        if re.match(r"[a-z]+:", target):
            return match[0]
        resolved = resolve(posixpath.normpath(posixpath.join(posixpath.dirname(source), target)), files)
        if resolved is None:
            return match[0]  # the strict build reports it
        path, own_anchor = resolved
        return f"{opening}{posixpath.relpath(path, posixpath.dirname(uri) or '.')}{anchor or own_anchor}{closing}"

    return _LINK.sub(rewrite, markdown)


def on_page_content(html: str, page: Page, files: Files, **_: Any) -> str:
    """Mark the tables, pictures and options of a page for small screens."""

    def find(source: str) -> Path | None:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.dest_uri), source))
        file = next((file for file in files if file.dest_uri == path), None)
        return None if file is None or file.abs_src_path is None else Path(file.abs_src_path)

    return small_screens.size_images(small_screens.keep_options(small_screens.mark_tables(html)), find)


def on_post_build(config: MkDocsConfig, **_: Any) -> None:
    """Rank the entries of the search, after its plugin wrote them and before they are copied for use from disk."""
    path = Path(config.site_dir, "search", "search_index.json")
    index = json.loads(path.read_text(encoding="utf-8"))
    search_index.rank_entries(index["docs"])
    path.write_text(json.dumps(index, separators=(",", ":")), encoding="utf-8")


def resolve(path: str, files: Files) -> tuple[str, str] | None:
    """Return the page of the site for a path of the repository, with an anchor; None if there is none."""
    uri = PAGES.get(path, path.removeprefix("docs/"))
    if files.get_file_from_path(uri) is not None:
        return uri, ""
    if path.startswith("results") and (ROOT / path).is_dir():
        folders = path.split("/")
        return ("results.md", "") if len(folders) == 1 else ("results-files.md", f"#{folders[1]}")
    return None
