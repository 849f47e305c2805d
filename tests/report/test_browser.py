"""The page in a real browser: nothing fails, charts are drawn, and what can be clicked does what it says."""

import json
import os
import shutil

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
KINDS = ("healthy", "collapsed", "compared", "not-evaluated", "hostile")
DESKTOP, PHONE = {"width": 1280, "height": 900}, {"width": 360, "height": 740}
HOSTILE = "<img src=x onerror=hacked=1></script><script>hacked=1</script>"


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium; without it, or without playwright, these tests are skipped."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install playwright")
    executable = next(filter(None, map(shutil.which, BROWSERS)), None)
    if executable is None:
        pytest.skip(f"needs a browser: none of {', '.join(BROWSERS)} is installed")
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=executable, args=arguments)
        yield running
        running.close()


@pytest.fixture(scope="module")
def pages(browser, tmp_path_factory, trained, healthy_page, collapse, write_page):
    """A page of each kind."""
    folder = tmp_path_factory.mktemp("pages")

    def copied(name):
        return shutil.copytree(trained, folder / name)

    fallen, bare = copied("fallen"), copied("bare")
    collapse(fallen)
    (bare / "evaluation.json").unlink()
    hostile = copied(HOSTILE.replace("/", "\u2215"))
    five = [trained, fallen, bare, hostile, copied("another")]
    return {
        "healthy": healthy_page,
        "collapsed": write_page([fallen], folder / "collapsed.html"),
        "compared": write_page(five, folder / "compared.html"),
        "not-evaluated": write_page([bare], folder / "bare.html"),
        "hostile": write_page([hostile], folder / "hostile.html"),
    }


@pytest.fixture
def show(browser, pages):
    """Open a page of a kind; what the console says and what is fetched is kept with it."""
    contexts = []

    def open_page(kind, viewport=DESKTOP, **options):
        contexts.append(browser.new_context(viewport=viewport, **options))
        page = contexts[-1].new_page()
        page.said, page.fetched = [], []
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.on("request", lambda request: page.fetched.append(request.url))
        page.goto(pages[kind].as_uri())
        page.wait_for_function(
            "document.querySelectorAll('figure.chart').length === document.querySelectorAll('.uplot').length"
        )
        return page

    yield open_page
    for context in contexts:
        context.close()


# How many colours a canvas shows: axes alone make a few, curves with their soft edges many.
COLOURS = """(canvas) => {
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d"); // of reading a canvas often, it warns
  copy.drawImage(canvas, 0, 0);
  const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
  const found = new Set();
  for (let i = 0; i < data.length; i += 4) if (data[i + 3]) found.add(data.slice(i, i + 4).join());
  return found.size;
}"""
# Whether a canvas holds this colour of the page's style.
HOLDS = """(canvas, name) => {
  const text = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const wanted = [1, 3, 5].map((place) => parseInt(text.slice(place, place + 2), 16));
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d"); // of reading a canvas often, it warns
  copy.drawImage(canvas, 0, 0);
  const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
  for (let i = 0; i < data.length; i += 4)
    if (data[i + 3] === 255 && wanted.every((value, place) => data[i + place] === value)) return true;
  return false;
}"""


LIGHTNESS = """() => getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3)
  .map(Number).reduce((sum, value) => sum + value)"""


def wait_for_colour(page, name, *, shown=True):
    """Wait until the first chart is drawn with this colour of the page, or without."""
    page.wait_for_function(
        f"""([name, shown]) => {{
          const canvas = document.querySelector("figure.chart canvas");
          return canvas && ({HOLDS})(canvas, name) === shown;
        }}""",
        arg=[name, shown],
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_opens_without_a_complaint_and_draws_every_chart(show, kind):
    page = show(kind)
    charts = page.locator("figure.chart canvas").element_handles()
    assert len(charts) >= 4
    assert min(chart.evaluate(COLOURS) for chart in charts) > 10
    assert page.said == []
    assert {url.split(":")[0] for url in page.fetched} <= {"file", "data"}
    assert [url for url in page.fetched if url.startswith("file")] == [page.url]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_phone_nothing_sticks_out(show, kind):
    page = show(kind, PHONE, is_mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.said == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_everything_to_see_can_also_be_read(show, kind):
    page = show(kind)
    silent = "[...document.querySelectorAll('img, .plot')].filter((e) => !(e.alt || e.ariaLabel)).length"
    assert page.evaluate(silent) == 0
    broken = "[...document.images].filter((image) => !image.naturalWidth).length"
    assert page.evaluate(broken) == 0
    nameless = "[...document.querySelectorAll('button')].filter((e) => !e.textContent.trim()).length"
    assert page.evaluate(nameless) == 0


@pytest.mark.slow
def test_texts_stay_texts(show):
    page = show("hostile")
    assert page.evaluate("typeof hacked") == "undefined"
    assert page.locator("h1").inner_text() == HOSTILE.replace("/", "\u2215")


@pytest.mark.slow
def test_a_series_can_be_switched_off_and_on(show):
    page = show("healthy")
    chart = page.locator("figure.chart").first
    canvas, button = chart.locator("canvas"), chart.get_by_role("button", name="FGSM")
    assert canvas.evaluate(HOLDS, "c1")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    wait_for_colour(page, "c1", shown=False)
    button.press("Enter")
    wait_for_colour(page, "c1")
    assert button.get_attribute("aria-pressed") == "true"


@pytest.mark.slow
def test_the_collapse_is_marked(show):
    assert show("collapsed").locator("figure.chart canvas").first.evaluate(HOLDS, "bad")
    assert not show("healthy").locator("figure.chart canvas").first.evaluate(HOLDS, "bad")


@pytest.mark.slow
def test_hovering_tells_the_figures_of_an_epoch(show, trained):
    from playwright.sync_api import expect

    page = show("healthy")
    chart = page.locator("figure.chart").first
    chart.scroll_into_view_if_needed()
    box = chart.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + 2, box["y"] + 20)  # the first epoch
    first = json.loads((trained / "metrics.jsonl").read_text().splitlines()[0])
    values = chart.locator(".legend .value")
    for place, key in enumerate(("clean", "fgsm", "pgd10")):
        expect(values.nth(place)).to_have_text(f"{100 * first[key]:.1f}")
    others = page.locator("figure.chart").nth(1).locator(".value").first  # charts over the same epochs follow
    expect(others).to_have_text(f"{first['loss']:.3f}")


@pytest.mark.slow
def test_tables_sort_by_click_and_by_key(show):
    page = show("healthy")
    table = page.locator("#classes table.sortable").first
    heading = table.locator("th").nth(3)

    def column():
        return [float(text) for text in table.locator("tbody tr td:nth-child(4)").all_inner_texts()]

    before = column()
    heading.get_by_role("button").click()
    assert column() == sorted(before, reverse=True)
    assert heading.get_attribute("aria-sort") == "descending"
    heading.get_by_role("button").press("Enter")
    assert column() == sorted(before)
    assert heading.get_attribute("aria-sort") == "ascending"
    table.locator("th").first.get_by_role("button").click()
    assert table.locator("tbody th").all_inner_texts() == [str(number) for number in range(10)]
    assert heading.get_attribute("aria-sort") == "none"


@pytest.mark.slow
def test_compared_runs_sort_by_name(show):
    page = show("compared")
    table = page.locator("#summary table.sortable")
    names = table.locator("tbody th")
    table.get_by_role("button", name="run").click()
    assert len(names.all_inner_texts()) == 5
    assert names.all_inner_texts() == sorted(names.all_inner_texts(), key=str.lower)


@pytest.mark.slow
def test_the_gallery_shows_the_attack_that_is_chosen_and_sorts(show):
    page = show("healthy")
    cards = page.locator(".cards > li")
    for attack in ("FGSM", "PGD-10", "APGD-CE"):
        page.locator("#gallery").get_by_role("button", name=attack, exact=True).click()
        shown = page.locator(".cards [data-attack]:visible")
        names = shown.evaluate_all("all => [...new Set(all.map((e) => e.dataset.attack))]")
        assert names == [attack.lower().replace("-10", "10")]

    def order(name):
        return cards.evaluate_all(f"all => all.map((e) => Number(e.dataset.{name}))")

    choice = page.get_by_role("group", name="Sort by")
    choice.get_by_role("button", name="number").click()
    assert order("index") == sorted(order("index"))
    choice.get_by_role("button", name="class").click()
    assert order("class") == sorted(order("class"))
    choice.get_by_role("button", name="outcome").click()
    assert order("broken") == sorted(order("broken"))
    assert page.locator("#gallery [role=status]").inner_text() == "Sort by: outcome"
    choice.get_by_role("button", name="confidence under attack").click()
    found = page.locator(".cards [data-confidence]:visible").evaluate_all(
        "all => all.map((e) => +e.dataset.confidence)"
    )
    assert found == sorted(found, reverse=True)


@pytest.mark.slow
def test_dark_mode_and_print(show):
    page = show("collapsed", color_scheme="dark")

    assert page.evaluate(LIGHTNESS) < 150
    canvas = page.locator("figure.chart canvas").first
    assert canvas.evaluate(HOLDS, "c2")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--c2').trim()") == "#0072b2"
    wait_for_colour(page, "c2")  # drawn again in the colours for paper
    assert len(page.pdf(format="A4")) > 20_000
    page.emulate_media(media="screen", color_scheme="light")
    page.wait_for_function(f"({LIGHTNESS})() > 700")
    assert page.said == []
