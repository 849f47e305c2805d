"""Rendering: text from outside stays text wherever a template puts it."""

import json
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError

from atas.report.charts import Chart, ChartLine, Mark
from atas.report.elements import Cell, DataTable, Section, Whisker
from atas.report.headline import HeadlineAnswer
from atas.report.page import render, render_page, to_json

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--",
    "]]>",
    '"><img src=x onerror=alert(1)>',
    "a & b",
    "\u2028\u2029",
    "{{ version }}",
]
TEXTS = st.one_of(st.text(), st.sampled_from(HOSTILE))


class Elements(HTMLParser):
    """Every element that a browser would see, with its attributes, and the text outside of scripts and styles."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.names, self.attributes, self.text, self._skip = [], [], "", False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.attributes.append(dict(attrs))
        self._skip = tag in ("script", "style")

    def handle_endtag(self, tag):
        self._skip = False

    def handle_data(self, data):
        self.text += "" if self._skip else data

    def handle_comment(self, data):
        raise AssertionError(f"a comment began: {data!r}")


def as_shown(text):
    """The text with control characters and lone surrogates replaced."""
    whole = text.encode("utf-8", "replace").decode()
    return "".join("\ufffd" if (ord(c) < 32 and c not in "\t\n\r") or ord(c) == 127 else c for c in whole)


def comparison(text):
    """A section with `text` in elements and attributes."""
    cell = Cell(text, note=text, sort=text, title=text, whisker=Whisker(0.5, (0.4, 0.6)))
    answer = HeadlineAnswer(text, text, text, "good")
    return {
        "answers": [answer],
        "runs": DataTable(["run", f"{text}."], [[text, cell]], text, sortable=True, class_="runs"),
    }


@given(TEXTS)
def test_text_and_attributes_arrive_unchanged(text):
    parsed = Elements(render("sections/comparison.html", comparison(text)))
    assert parsed.names == Elements(render("sections/comparison.html", comparison("x"))).names
    cell = next(attributes for attributes in parsed.attributes if "data-sort" in attributes)
    assert cell["title"] == cell["data-sort"] == as_shown(text)
    region = next(attributes for attributes in parsed.attributes if attributes.get("role") == "region")
    assert region["aria-label"] == as_shown(text)
    assert parsed.text.count(as_shown(text)) >= 6


@given(st.dictionaries(TEXTS, TEXTS, max_size=3))
def test_json_arrives_unchanged_and_ends_no_script(value):
    text = to_json(value)
    assert text.isascii()
    assert not set("<>&") & set(text)
    assert json.loads(text) == value


def test_json_has_six_digits_and_null_for_nan():
    text = to_json({"a": [1.0, float("nan"), float("inf"), None, 0.123456789]})
    assert json.loads(text) == {"a": [1.0, None, None, None, 0.123457]}


@pytest.mark.parametrize("text", HOSTILE)
def test_a_page_with_hostile_names(text):
    chart = Chart(text, text, text, [1], [ChartLine(text, [1.0], "c0")], marks=[Mark(1, text)], note=text)
    sections = [
        Section("summary", text, "comparison", comparison(text)),
        Section("training", text, "comparison_curves", {"charts": [chart, chart]}),
    ]
    page = render_page(text, text, sections)
    parsed = Elements(page)
    assert not [key for attributes in parsed.attributes for key in attributes if key.startswith("on")]
    assert page.count("</script>") == parsed.names.count("script") == 4
    plots = [attributes for attributes in parsed.attributes if attributes.get("class") == "plot"]
    assert len(plots) == 2
    assert all(plot["role"] == "img" and text in plot["aria-label"] for plot in plots)


def test_file_names_that_are_not_utf8_can_be_written():
    name = b"run-\xff".decode("utf-8", "surrogateescape")
    page = render_page(name, "", [])
    assert b"<h1>run-?</h1>" in page.encode("utf-8")


def test_a_missing_variable_is_an_error():
    with pytest.raises(UndefinedError, match="answers"):
        render("sections/comparison.html", {})


def test_optional_attributes():
    rows = [["a", Cell("1", class_="heat")]]
    text = render("sections/comparison.html", {"answers": [], "runs": DataTable(["", "n"], rows, "c")})
    assert '<th scope="col"></th>' in text
    assert '<td class="number heat">1</td>' in text
    assert "data-sort" not in text
    assert "<table>" in text


def test_a_long_table_scrolls_on_its_own():
    def classes(rows):
        return render("sections/comparison.html", {"answers": [], "runs": DataTable(["a"], [["1"]] * rows, "c")})

    assert '<div class="scroll" ' in classes(30)
    assert '<div class="scroll tall" ' in classes(31)
