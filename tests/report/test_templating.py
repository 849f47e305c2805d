"""No text, whatever it is, gets out of its place in the page."""

import json
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atas.report.html import Markup, escape, join, json_script, tag

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--",
    "]]>",
    '"><img src=x onerror=alert(1)>',
    "a & b",
    "\u2028\u2029",
]
TEXTS = st.one_of(st.text(), st.sampled_from(HOSTILE))


class Elements(HTMLParser):
    """Every element that a browser would see, with its attributes and the text inside."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.found, self.texts = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)

    def handle_comment(self, data):
        raise AssertionError(f"a comment began: {data!r}")


def as_shown(text):
    """What escaping leaves of a text: control characters and halves of characters are replaced."""
    whole = text.encode("utf-8", "replace").decode()
    return "".join("\ufffd" if (ord(c) < 32 and c not in "\t\n\r") or ord(c) == 127 else c for c in whole)


@given(TEXTS, TEXTS)
def test_texts_and_attributes_arrive_as_they_were(text, title):
    parsed = Elements(tag("p", text, title=title))
    assert [name for name, _ in parsed.found] == ["p"]
    assert "".join(parsed.texts) == as_shown(text)
    assert parsed.found[0][1]["title"] == as_shown(title)


@given(st.dictionaries(TEXTS, TEXTS, max_size=3))
def test_data_arrives_as_it_was_and_ends_no_script(value):
    text = json_script(value)
    assert text.isascii()
    parsed = Elements(text)
    assert [name for name, _ in parsed.found] == ["script"]
    inside = text.removeprefix('<script type="application/json">').removesuffix("</script>")
    assert not set("<>&") & set(inside)
    assert json.loads(inside) == value


def test_what_is_no_number_is_null():
    inside = json_script({"a": [1.0, float("nan"), float("inf"), None, 0.123456789]})
    assert json.loads(inside[inside.index("{") : inside.rindex("}") + 1]) == {"a": [1.0, None, None, None, 0.123457]}


def test_markup_is_kept_and_nested():
    assert tag("p", tag("b", "x"), ["<", None, [tag("br")]]) == "<p><b>x</b>&lt;<br></p>"
    assert join(Markup("<i>")) == "<i>"
    assert escape(3) == "3"


def test_attributes():
    assert tag("img", alt="", width=3, hidden=False) == '<img alt="" width="3">'
    assert (
        tag("div", data_sort=0.5, aria_label="a", class_="b") == '<div data-sort="0.5" aria-label="a" class="b"></div>'
    )


def test_halves_of_characters_can_be_written():
    """File names that are no UTF-8 come with such halves."""
    shown = escape(b"run-\xff".decode("utf-8", "surrogateescape"))
    assert shown.encode("utf-8") == b"run-?"


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts(text):
    assert Elements(tag("p", text)).found == [("p", {})]
