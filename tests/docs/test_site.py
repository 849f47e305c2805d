"""The site builds without a warning, fetches nothing, and has no broken link."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import atas

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for name in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(name, reason=f"the site needs {name}: pip install 'atas[docs]'")
    folder = tmp_path_factory.mktemp("site")
    # The reference must be generated from this code, wherever the package is installed.
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(Path(atas.__file__).parent.parent)}
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(build, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


class Reader(HTMLParser):
    """The anchors, links and loaded files of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors |= {found[key] for key in ("id", "name") if found.get(key)}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        self.loads += [found[key] for key in ("src", "href") if found.get(key) and tag not in ("a", "base")]


@pytest.fixture(scope="module")
def pages(site):
    found = {path: Reader(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    assert len(found) > 25
    return found


def test_site_fetches_nothing(site, pages):
    for path, page in pages.items():
        assert not [load for load in page.loads if urlsplit(load).scheme in ("http", "https")], path
    sheets = list(site.rglob("*.css"))
    assert sheets
    for sheet in sheets:
        assert "url(http" not in sheet.read_text(encoding="utf-8"), sheet


def test_targets_of_links_exist(site, pages):
    assert sum(len(page.links) for page in pages.values()) > 500
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its links are absolute, because it is shown at any address
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            assert target.exists(), f"{path.relative_to(site)} links to {link}"
            if parts.fragment and target.suffix == ".html":
                assert unquote(parts.fragment) in pages[target].anchors | {"__top"}, f"{path.relative_to(site)}: {link}"


def test_reference_pages_are_generated_from_the_code(site):
    recipes = (site / "reference" / "recipes.html").read_text(encoding="utf-8")
    for key in ("on_collapse", "max_step", "checkpoints", "weight_decay"):
        assert f"<code>{key}</code>" in recipes
    command = re.sub(r"<[^>]*>", "", (site / "reference" / "command.html").read_text(encoding="utf-8"))
    for part in ("atas data verify", "--skip-damaged", "--attacks", "[default: 256]", "atas compare runs/atas"):
        assert part in command
    methods = (site / "reference" / "methods.html").read_text(encoding="utf-8")
    assert 'id="atas.methods.ATAS"' in methods
    assert "&gt;&gt;&gt;" in methods  # examples are shown as code


def test_the_search_works_from_disk(site):
    playwright = pytest.importorskip("playwright.sync_api")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs a browser: chromium or google-chrome on the path")
    with playwright.sync_playwright() as player:
        opened = player.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = opened.new_page(viewport={"width": 1280, "height": 900})
        requests, errors = [], []
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto((site / "index.html").as_uri())
        page.keyboard.press("/")
        page.keyboard.type("warmup_epochs")
        page.wait_for_selector(".md-search-result__item", timeout=15000)
        opened.close()
    assert not errors
    assert not [url for url in requests if url.startswith("http")]
