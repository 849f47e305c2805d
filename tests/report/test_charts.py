"""Charts: what the script gets, what is read aloud, and the table of the same figures."""

import json
import re

import pytest

from atas.report.charts import Chart, Line, Mark, Range


@pytest.fixture
def chart():
    return Chart(
        "Accuracy",
        "epoch",
        "accuracy, %",
        [1, 2, 3],
        [Line("clean", [50.0, 70.0, 60.0], "c0"), Line("PGD-10", [10.0, None, float("nan")], "c2", shown=False)],
        ranges=[Range("half", [1.0, 2.0, 3.0], [4.0, 5.0, 6.0], "c2")],
        marks=[Mark(2, "collapse")],
        limits=(0, 100),
    )


def data_of(chart):
    return json.loads(re.search(r'<script type="application/json">(.*?)</script>', chart.html())[1])


def test_what_the_script_gets(chart):
    data = data_of(chart)
    assert data["x"] == [1, 2, 3]
    assert data["columns"] == [[1, 2, 3], [4, 5, 6], [50, 70, 60], [10, None, None]]
    assert data["legend"] == [
        {"label": "half", "series": [1, 2], "band": True},
        {"label": "clean", "series": [3]},
        {"label": "PGD-10", "series": [4]},
    ]
    assert [series["colour"] for series in data["series"]] == ["c2", "c2", "c0", "c2"]
    assert data["series"][3]["shown"] is False
    assert data["marks"] == [{"x": 2, "text": "collapse"}]
    assert data["limits"] == [0, 100]


def test_in_words(chart):
    words = chart.description()
    assert words.startswith("Accuracy: accuracy, % by epoch.")
    assert "clean: 50.0 at first, 60.0 at last; least 50.0 at 1, most 70.0 at 2." in words
    assert "PGD-10: 10.0 at first, 10.0 at last" in words
    assert words.endswith("collapse at 2.")
    assert 'role="img"' in chart.html()


def test_as_a_table(chart):
    rows = re.findall(r"<tr>(.*?)</tr>", chart.html())
    cells = [re.sub("<[^>]+>", " ", row).split() for row in rows[1:]]
    assert cells == [
        ["1", "1.0", "4.0", "50.0", "10.0"],
        ["2", "2.0", "5.0", "70.0", "-"],
        ["3", "3.0", "6.0", "60.0", "-"],
    ]


def test_labels_are_escaped():
    hostile = "</script><b>x"
    chart = Chart(hostile, hostile, hostile, [1], [Line(hostile, [1.0], "c0")], marks=[Mark(1, hostile)])
    text = chart.html()
    assert "<b>" not in text
    assert text.count("</script>") == 1
    assert data_of(chart)["legend"][0]["label"] == hostile
