"""Records of trials: what is damaged is refused with a sentence, and records of earlier versions are read."""

import json
import re
from pathlib import Path

import pytest

from atas.errors import DataError
from atas.sweeps.record import Record
from atas.sweeps.store import Store

(KEPT,) = (Path(__file__).parents[1] / "frozen" / "fixtures" / "plan" / "runs").glob("*-atas-*.json")


def changed(path, value):
    """The kept record with a value put at a path of keys."""
    document = json.loads(KEPT.read_text())
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\xff", "not JSON"),
        (b'{"a":' * 100_000, "nested too deeply"),
        (b"[]", "it is a list, not an object"),
        (changed(["format"], 2), "another format"),
        (changed(["n"], "40"), "n is '40', not a whole number"),
        (changed(["attacks", "clean", "accuracy"], 0.123), "the accuracy under clean does not agree with its count"),
        (changed(["attacks", "clean", "interval"], [0.5]), "attacks.clean.interval is a list, not a list of 2"),
        (changed(["training", "collapsed_in_epoch"], "no"), "training.collapsed_in_epoch is 'no', not a whole number"),
        (changed(["training", "environment"], None), "training.environment is None, not an object"),
        (changed(["observed"], {"curves": {}}), "'observed.curves.environment' is missing"),
        (KEPT.read_bytes().replace(b'"observed"', b'"obsernd"'), "the key 'obsernd' is unknown"),
        (KEPT.read_bytes().replace(b'"attacks": {', b'"attacka": {', 1), "'attacks' is missing"),
    ],
)
def test_a_damaged_record_is_refused(content, why, tmp_path):
    path = tmp_path / "record.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"the record .* is damaged \(.*{re.escape(why)}.*\); remove it and") as caught:
        Record.load(path)
    assert "\n" not in str(caught.value)


def test_a_record_comes_back(tmp_path):
    record = Record.load(KEPT)
    record.save(tmp_path / "record.json")
    assert Record.load(tmp_path / "record.json") == record


@pytest.mark.parametrize("content", [b"\xff", b"[]", b"{}", b'{"row": 1, "trial": "t", "error": "e"}'])
def test_a_damaged_error_file_is_refused(content, tmp_path):
    path = tmp_path / "runs" / "toy-seed0-0123.error.json"
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"error file .* is damaged"):
        Store(tmp_path).errors_by_row()
