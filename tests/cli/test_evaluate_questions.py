"""`atas evaluate` with other questions than robust accuracy."""

import json

import numpy as np
import pytest
from PIL import Image

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


def test_a_mask(command, copy_of, tmp_path):
    folder, pixels = copy_of(), np.zeros((8, 8), dtype=np.uint8)
    pixels[:4] = 255
    Image.fromarray(pixels).save(tmp_path / "mask.png")
    result = command("evaluate", folder, "--mask", tmp_path / "mask.png")
    assert result.status == 0, result.err
    assert "on 50% of the pixels" in result.out
    found = json.loads((folder / "masked-evaluation.json").read_text())
    assert found["protocol"]["mask"]["share"] == 0.5
    assert load_results(folder) == []


def test_a_mask_that_cannot_be_used_is_refused(command, copy_of, tmp_path):
    folder = copy_of()
    Image.new("L", (9, 8), 255).save(tmp_path / "large.png")
    Image.new("L", (8, 8), 0).save(tmp_path / "black.png")
    (tmp_path / "text.png").write_text("white")
    for name, message in {
        "large.png": "is 9 x 8 pixels, the images are 8 x 8",
        "black.png": "has no white pixel",
        "text.png": "cannot read the mask",
        "none.png": "cannot read the mask",
    }.items():
        result = command("evaluate", folder, "--mask", tmp_path / name)
        assert result.status == 1
        assert message in result.err.replace("\n", " ")
