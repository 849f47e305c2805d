"""Charts: data for the script, text for screen readers, and a table of the same numbers."""

import json

import pytest

from atas.report.charts import Band, Chart, ChartLine, Mark
from atas.report.page import to_json


@pytest.fixture
def chart():
    return Chart(
        "Accuracy",
        "epoch",
        "accuracy, %",
        [1, 2, 3],
        [
            ChartLine("clean", [50.0, 70.0, 60.0], "c0"),
            ChartLine("PGD-10", [10.0, None, float("nan")], "c2", shown=False),
        ],
        ranges=[Band("half", [1.0, 2.0, 3.0], [4.0, 5.0, 6.0], "c2")],
        marks=[Mark(2, "collapse")],
        limits=(0, 100),
    )


def test_data_for_the_script(chart):
    data = json.loads(to_json(chart.data()))
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


def test_description_for_screen_readers(chart):
    words = chart.description()
    assert words.startswith("Accuracy: accuracy, % by epoch.")
    assert "clean: 50.0 at first, 60.0 at last; least 50.0 at 1, most 70.0 at 2." in words
    assert "PGD-10: 10.0 at first, 10.0 at last" in words
    assert words.endswith("collapse at 2.")


def test_table_of_the_same_numbers(chart):
    table = chart.table()
    assert table.head == ["epoch", "half, from", "to", "clean", "PGD-10"]
    assert table.rows == [
        ["1", "1.0", "4.0", "50.0", "10.0"],
        ["2", "2.0", "5.0", "70.0", "-"],
        ["3", "3.0", "6.0", "60.0", "-"],
    ]
