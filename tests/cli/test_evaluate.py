"""`atas evaluate`."""

import json

import pytest


def test_a_table_and_a_file(command, copy_of):
    folder = copy_of()
    result = command("evaluate", folder)
    assert result.status == 0, result.err
    for word in ("clean", "fgsm", "worst", "40 examples"):
        assert word in result.out
    found = json.loads((folder / "evaluation.json").read_text())
    assert set(found["accuracy"]) == {"clean", "fgsm", "worst"}
    assert found["n"] == 40
    assert len(found["correct"]["fgsm"]) == 40
    assert found["accuracy"]["worst"] <= found["accuracy"]["fgsm"]


def test_the_path_of_the_file_is_in_one_piece(command, copy_of, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    folder = copy_of("a-long-name-" * 8)
    assert command("evaluate", folder).out.splitlines()[-1] == f"written: {folder / 'evaluation.json'}"


def test_options(evaluate_json, copy_of):
    folder = copy_of()
    found = evaluate_json(folder, "--attacks", "fgsm, pgd10", "--examples", 25, "--batch-size", 7, "--seed", 4)
    assert (found["n"], set(found["accuracy"])) == (25, {"clean", "fgsm", "pgd10", "worst"})
    assert (found["protocol"]["seed"], found["protocol"]["batch_size"]) == (4, 7)
    assert found["protocol"]["image_shape"] == [1, 8, 8]
    again = evaluate_json(folder, "--attacks", "fgsm,pgd10", "--examples", 25, "--seed", 4)
    assert again["correct"] == found["correct"]
    stepped = evaluate_json(folder, "--attacks", "pgd10", "--examples", 25, "--step-size", "2/255")
    assert 2 / 255 in stepped["protocol"]["attacks"]["pgd10"].values()


def test_the_saved_result_is_the_last_one_on_the_most_images(evaluate_json, copy_of):
    """A quick look at a few images does not replace an evaluation on all of them."""
    folder = copy_of()
    evaluate_json(folder)
    whole = evaluate_json(folder, "--seed", 1)
    few = evaluate_json(folder, "--examples", 10)
    assert json.loads((folder / "evaluation.json").read_text()) == whole
    assert json.loads((folder / "evaluation-10.json").read_text()) == few


@pytest.mark.parametrize(
    ("arguments", "status", "parts"),
    [
        (["--attacks", "pgd10,bogus"], 2, ["bogus"]),
        (["--attacks", "pdg10"], 2, ["pdg10"]),
        (["--attacks", ""], 2, []),
        (["--step-size", "fast"], 2, ["--step-size must be a number or a fraction such as 8/255; got 'fast'"]),
        (["--attacks", "pgd10", "--step-size", "-1/255"], 2, ["step_size must be a number above zero"]),
        (["--device", "tpu9"], 2, ["there is no device 'tpu9'"]),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else str(value),
)
def test_wrong_use_is_one_sentence(arguments, status, parts, command, copy_of, contents):
    folder = copy_of()
    before = contents(folder)
    command("evaluate", folder, *arguments).sentence(*parts, status=status)
    assert contents(folder) == before


def test_no_examples_at_all(command, finished):
    assert command("evaluate", finished, "--examples", 0).status == 2


def test_not_the_folder_of_a_run(command, tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        command("evaluate", folder).sentence(f"{folder} is not the folder of a run", "recipe.toml", status=1)


def test_an_unfinished_run(command, unfinished, contents):
    before = contents(unfinished)
    result = command("evaluate", unfinished)
    result.sentence("has not finished; go on with: atas train --resume --out", str(unfinished), status=1)
    assert contents(unfinished) == before


@pytest.mark.parametrize("content", [b"", b"garbage", None])
def test_damaged_weights(content, command, copy_of):
    folder = copy_of()
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-500] if content is None else content)
    command("evaluate", folder).sentence(str(weights), "cannot be read", status=1)


def test_weights_of_another_file(command, copy_of):
    import torch
    from safetensors.torch import save_file

    folder = copy_of()
    save_file({"weight": torch.zeros(3)}, folder / "model.safetensors")
    result = command("evaluate", folder)
    assert result.status in (1, 2)
    result.sentence("model.safetensors", status=result.status)


def test_data_that_is_not_there(command, copy_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = copy_of()
    text = (folder / "recipe.toml").read_text().replace('name = "digits"', 'name = "cifar10"')
    (folder / "recipe.toml").write_text(text)
    command("evaluate", folder, "--root", tmp_path / "none").sentence("atas data get cifar10", status=1)


def test_data_that_was_given_in_python(command, copy_of):
    folder = copy_of()
    text = (folder / "recipe.toml").read_text().replace('name = "digits"', 'name = "given:mine"')
    (folder / "recipe.toml").write_text(text)
    command("evaluate", folder).sentence("given", "Python", status=2)
