"""`atas evaluate` with other questions than robust accuracy."""

import json

import numpy as np
import pytest
from PIL import Image

from atas.evaluation.result import Evaluation, load_results


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


def test_another_mask_is_another_result(command, copy_of, tmp_path):
    folder = copy_of()
    for rows in (4, 2, 4, 2):
        pixels = np.zeros((8, 8), dtype=np.uint8)
        pixels[:rows] = 255
        Image.fromarray(pixels).save(tmp_path / "mask.png")
        assert command("evaluate", folder, "--mask", tmp_path / "mask.png", "--attacks", "fgsm").status == 0
    found = [json.loads(path.read_text())["protocol"]["mask"]["share"] for path in folder.glob("masked-*.json")]
    assert sorted(found) == [0.25, 0.5]
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


def test_perturbed_images_are_kept(command, copy_of, tmp_path):
    folder = copy_of()
    result = command("evaluate", folder, "--keep", tmp_path / "kept.npz")
    assert result.status == 0, result.err
    assert f"written: {tmp_path / 'kept.npz'}" in result.out
    with np.load(tmp_path / "kept.npz", allow_pickle=False) as file:
        arrays = dict(file)
    assert arrays["x_adv.fgsm"].shape == (40, 1, 8, 8)
    found = json.loads((folder / "evaluation.json").read_text())
    assert arrays["correct.fgsm"].mean() == found["accuracy"]["fgsm"]
    assert not list(folder.glob("*.points-*"))
    refused = command("evaluate", folder, "--keep", tmp_path / "kept.png")
    assert (refused.status, "--keep names a file that ends in .npz or .safetensors" in refused.err) == (2, True)


@pytest.mark.parametrize("name", ["model.safetensors", "evaluation.safetensors", "data.npz", "damaged.safetensors"])
def test_perturbed_images_replace_no_other_file(command, copy_of, name):
    folder = copy_of()
    np.savez(folder / "data.npz", images=np.zeros(3))
    (folder / "damaged.safetensors").write_bytes(b"x" * 99)
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    result = command("evaluate", folder, "--keep", folder / name)
    assert result.status == 2
    part = "--keep cannot be" if name.startswith("evaluation") else "which holds something else: give another name"
    assert part in result.err.replace("\n", " ")
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name in before} == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kept.npz", "kept.safetensors"])
def test_perturbed_images_replace_earlier_ones(command, copy_of, name):
    folder = copy_of()
    for _ in range(2):
        assert command("evaluate", folder, "--keep", folder / name).status == 0
    assert Evaluation.load(folder / "evaluation.json").details is not None


def test_other_questions_store_no_details_and_replace_no_weights(command, copy_of, tmp_path):
    folder = copy_of()
    Image.new("L", (8, 8), 255).save(tmp_path / "mask.png")
    for options in (("--target-class", 3), ("--mask", tmp_path / "mask.png"), ("--curve", "0.1", "--attacks", "pgd2")):
        weights = (folder / "model.safetensors").read_bytes()
        refused = command("evaluate", folder, *options, "--out", folder / "model.json")
        assert (refused.status, "which holds something else" in refused.err.replace("\n", " ")) == (2, True)
        assert (folder / "model.safetensors").read_bytes() == weights
        assert command("evaluate", folder, *options).status == 0
    assert [path.name for path in folder.glob("*evaluation.safetensors")] == []
    assert command("evaluate", folder, "--attacks", "fgsm", "--out", folder / "x.json").status == 0
    assert command("evaluate", folder, "--mask", tmp_path / "mask.png", "--out", folder / "x.json").status == 0
    assert Evaluation.load(folder / "x.json").details is None, "those of the plain result"


@pytest.mark.slow
def test_a_curve(command, copy_of):
    folder = copy_of()
    result = command("evaluate", folder, "--curve", "0.2,0,0.05", "--attacks", "pgd5")
    assert result.status == 0, result.err
    assert "pgd5, linf, 40 examples" in result.out
    found = json.loads((folder / "curve-evaluation.json").read_text())
    assert found["eps"] == [0, 0.05, 0.2]
    assert len(found["smallest"]) == 40
    assert load_results(folder) == []
    assert json.loads(command("evaluate", folder, "--curve", "0.1", "--json").out)["attack"] == "pgd50"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--curve", "0.1", "--eps", "0.1"), "--eps cannot be combined with --curve"),
        (("--curve", "0.1", "--target-class", "3"), "--target-class cannot be combined with --curve"),
        (("--curve", "0.1", "--attacks", "pgd5,pgd10"), "--curve takes one attack"),
        (("--curve", "0.1", "--attacks", "fgsm"), "a curve needs an attack of searches"),
        (("--curve", "much"), "--curve"),
        (("--curve", ","), "--curve is empty"),
    ],
)
def test_wrong_curves_are_refused(command, copy_of, options, message):
    result = command("evaluate", copy_of(), *options)
    assert result.status == 2
    assert message in result.err.replace("\n", " ")


@pytest.mark.slow
def test_corruptions(command, copy_of):
    folder = copy_of()
    result = command("evaluate", folder, "--corruptions", "brightness, jpeg")
    assert result.status == 0, result.err
    assert "severity 5" in result.out
    found = json.loads((folder / "evaluation.json").read_text())
    assert list(found["corruptions"]) == ["brightness", "jpeg"]
    assert len(found["corruptions"]["jpeg"]["interval"]) == 5
    assert command("evaluate", folder, "--corruptions", "snow").status == 2
    assert command("evaluate", folder).status == 0  # without them: written next to what took longer
    assert json.loads((folder / "evaluation.json").read_text()) == found
    assert "corruptions" not in json.loads((folder / "evaluation-fgsm.json").read_text())


@pytest.mark.parametrize("options", [("--keep", "kept.npz"), ("--curve", "0.1"), ("--target-class", "3")])
def test_several_runs_are_refused(command, copy_of, options):
    """Their results would be one file, or be mixed with robust accuracy."""
    first = copy_of("first")
    copy_of("second")
    result = command("evaluate", first.parent, *options)
    assert result.status == 2
    assert f"{options[0]} needs one run, and" in result.err.replace("\n", " ")
