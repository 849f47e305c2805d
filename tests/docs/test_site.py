"""The site builds without a warning, fetches nothing, and has no broken link."""

from __future__ import annotations

import html
import json
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
    for key in ("training.on_collapse", "method.max_step", "method.checkpoints", "optimizer.weight_decay"):
        assert f'id="{key.replace(".", "")}">{key}<' in recipes
    command = re.sub(r"<[^>]*>", "", (site / "reference" / "command.html").read_text(encoding="utf-8"))
    for part in ("atas data verify", "--skip-damaged", "--attacks", "[default: 256]", "atas compare runs/atas"):
        assert part in command
    methods = (site / "reference" / "methods.html").read_text(encoding="utf-8")
    assert 'id="atas.methods.ATAS"' in methods
    assert "&gt;&gt;&gt;" in methods  # examples are shown as code


def test_the_home_page_is_the_readme(site):
    home = text_of(site / "index.html")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = re.findall(r"^\|(?!-)(.*)\|$", readme, re.MULTILINE)
    assert len(table) > 10
    for row in table:
        for cell in row.split(" | "):
            assert re.sub(r"\[(.*?)\]\(.*?\)|`", r"\1", cell).strip() in home
    assert "method.perturb(model, x, y, index, view)" in home


def test_results_are_tables(site):
    page = (site / "results.html").read_text(encoding="utf-8")
    assert page.count("<table") >= 8
    assert page.count("<img") >= 10
    row = next(row for row in re.findall(r"<tr>.*?</tr>", page, re.DOTALL) if "<code>atas</code>" in row)
    assert re.findall(r"<td[^>]*>([^<]*)</td>", row)[3] == "44.1 (44.0 to 44.3)"


def test_every_recipe_key_has_an_entry_in_the_search(site):
    entries = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    found = {entry["location"]: entry["title"] for entry in entries}
    names = json.loads((ROOT / "src" / "atas" / "cli" / "completion.json").read_text(encoding="utf-8"))
    keys = {f"{section}.{key}" for section, own in names["keys"].items() for key in own}
    keys |= {f"method.{key}" for own in names["settings"].values() for key in own}
    assert len(keys) > 80
    for key in keys:
        assert found[f"reference/recipes.html#{key.replace('.', '')}"] == key


def test_wide_tables_with_sentences_are_stacked_on_a_phone(site):
    methods = (site / "methods.html").read_text(encoding="utf-8")
    assert '<td data-label="BatchNorm">' in methods
    assert "<table data-stack>" not in (site / "glossary.html").read_text(encoding="utf-8")  # two columns


def test_stars_and_lists_are_read_as_meant(site, pages):
    assert "need one x* and one θ* for all steps" in " ".join(text_of(site / "theory.html").split())
    assert re.search(r"<li><code>yopo</code>: After each whole pass", (site / "methods.html").read_text("utf-8"))
    for path in pages:
        assert not re.search(r"<p>[^<]*(<code>[^<]*</code>[, ]*)+\n: ", path.read_text(encoding="utf-8")), path


def test_options_in_sentences_and_pictures_are_marked_for_small_screens(site):
    home = (site / "index.html").read_text(encoding="utf-8")
    assert '<code>atas train <span class="option">--auto</span> photos' in home
    assert re.search(r'<span class="picture" style="--width: 979px"><img [^>]*demo.png', home)


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    if executable is None:
        pytest.skip("needs a browser: chromium or google-chrome on the path")
    with playwright.sync_playwright() as player:
        opened = player.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.mark.parametrize(
    ("query", "target"),
    [
        ("schedule.peak", "reference/recipes.html#schedulepeak"),
        ("data.pad", "reference/recipes.html#datapad"),
        ("training.seed", "reference/recipes.html#trainingseed"),
        ("reset_every", "reference/recipes.html#methodreset_every"),
        ("on_collapse", "reference/recipes.html#trainingon_collapse"),
        ("write an attack", "write-an-attack.html"),
        ("write a method", "write-a-method.html"),
    ],
)
def test_the_search_leads_to_a_key_from_disk(site, browser, query, target):
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    requests, errors = [], []
    page.on("request", lambda request: requests.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto((site / "index.html").as_uri())
    page.keyboard.press("/")
    page.keyboard.type(query)
    page.wait_for_selector(".md-search-result__link", timeout=15000)
    # The first result is a page; below it is its best section, if one was found.
    links = page.eval_on_selector_all(".md-search-result__link", "(all) => all.slice(0, 2).map((link) => link.href)")
    page.close()
    assert target in {re.sub(r"\?h=[^#]*", "", link).removeprefix(f"{site.as_uri()}/") for link in links}
    assert not errors
    assert not [url for url in requests if url.startswith("http")]


def test_every_page_is_one_click_away(site):
    for path in (site / "index.html", site / "reference" / "recipes.html"):
        navigation = path.read_text(encoding="utf-8").partition("md-nav--primary")[2].partition("md-content")[0]
        for page in ("write-a-method", "write-an-attack", "settings", "glossary", "results"):
            assert re.search(rf'href="(\.\./)?{page}\.html"', navigation), (path, page)


def test_no_page_is_wider_than_a_phone(site, pages, browser):
    context = browser.new_context(viewport={"width": 390, "height": 844}, is_mobile=True)
    page = context.new_page()
    for path in pages:
        page.goto(path.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path.relative_to(site)
    context.close()


def test_pictures_can_be_read_on_a_phone_and_are_not_enlarged_on_a_wide_screen(site, browser):
    width = "(picture) => picture.getBoundingClientRect().width"
    sizes = {}
    for screen in (390, 1280):
        page = browser.new_page(viewport={"width": screen, "height": 844})
        page.goto((site / "results.html").as_uri())
        pictures = page.locator(".picture img").all()
        sizes[screen] = {picture.get_attribute("src").split("/")[-1]: picture.evaluate(width) for picture in pictures}
        page.close()
    assert sizes[390]["figure-adaptive.png"] == pytest.approx(0.67 * 12 * 96, abs=1)
    assert sizes[1280]["figure-steps.png"] == pytest.approx(5 * 96, abs=1)
    assert max(sizes[1280].values()) < 1000


def text_of(path: Path) -> str:
    return html.unescape(re.sub(r"<[^>]*>", "", path.read_text(encoding="utf-8")))
