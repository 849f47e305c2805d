"""`atas evaluate` with other questions than robust accuracy."""

import json

import pytest

from atas.evaluation.result import load_results


def test_a_target_class(command, copy_of):
    folder = copy_of()
    command("evaluate", folder)
    result = command("evaluate", folder, "--target-class", 3)
    assert result.status == 0, result.err
    assert "not pushed to the target" in result.out
    assert "target class 3" in result.out
    found = json.loads((folder / "target-3-evaluation.json").read_text())
    assert found["protocol"]["targets"]["class"] == 3
    assert found["n"] == 40 - found["protocol"]["targets"]["left_out"] < 40
    assert [one.targeted for one in load_results(folder)] == [False], "a report must not mix it with robust accuracy"


@pytest.mark.parametrize("name", ["cat", "10", "-1", "³"])
def test_an_unknown_target_class_is_refused(command, copy_of, name):
    result = command("evaluate", copy_of(), f"--target-class={name}")
    assert result.status == 2
    assert f"unknown class '{name}'" in result.err
