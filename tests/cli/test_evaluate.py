"""`atas evaluate`."""

import functools
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.run_files import recipe_text
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn.modules.module import register_module_forward_pre_hook

from atas import evaluation, models, recipes
from atas._utils import console, files
from atas.attacks import APGD, Square, auto_attack
from atas.recipes.expected import find_expected


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


def test_images_for_the_report_are_beside_the_file(command, copy_of):
    folder = copy_of()
    assert command("evaluate", folder, "--out", folder / "mine.json").status == 0
    details = evaluation.Evaluation.load(folder / "mine.json").details
    assert details.classes == tuple("0123456789")
    assert len(details.examples.index) == 24
    assert not (folder / "evaluation.safetensors").exists()


@pytest.mark.usefixtures("no_forward_pass")
def test_weights_are_not_replaced_by_images(command, copy_of, contents):
    folder = copy_of()
    before = contents(folder)
    command("evaluate", folder, "--out", folder / "model.json").sentence(
        "model.safetensors, which holds something else", "another name", status=2
    )
    assert contents(folder) == before


def test_the_path_of_the_file_is_in_one_piece(command, copy_of, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    folder = copy_of("a-long-name-" * 8)
    assert command("evaluate", folder).out.splitlines()[-1] == f"written: {folder / 'evaluation.json'}"


@pytest.mark.slow
def test_the_accuracy_that_the_recipe_promises_is_compared(command, copy_of):
    folder = copy_of()
    recipe = recipes.load("digits-small-cnn-atas").with_values({"evaluation.attacks": ("fgsm",)})
    (folder / "recipe.toml").write_text(recipe.to_toml())
    compared = f"the recipe says: {find_expected(recipe).sentence}"
    said = command("evaluate", folder, "--examples", 500).out.splitlines()
    assert said[-4] == compared
    assert said[-3].startswith("note: this run is far from that (")
    assert compared not in command("evaluate", folder, "--examples", 20).out  # fewer images
    assert compared not in command("evaluate", folder, "--examples", 500, "--eps", 0.01).out  # another threat
    assert compared not in command("evaluate", folder, "--examples", 500, "--json").out


@pytest.mark.slow
def test_evaluate_options_reach_the_result(evaluate_json, copy_of):
    folder = copy_of()
    found = evaluate_json(folder, "--attacks", "fgsm, pgd10", "--examples", 25, "--batch-size", 7, "--seed", 4)
    assert (found["n"], set(found["accuracy"])) == (25, {"clean", "fgsm", "pgd10", "worst"})
    assert (found["protocol"]["seed"], found["protocol"]["batch_size"]) == (4, 7)
    assert found["protocol"]["image_shape"] == [1, 8, 8]
    again = evaluate_json(folder, "--attacks", "fgsm,pgd10", "--examples", 25, "--seed", 4)
    assert again["correct"] == found["correct"]
    stepped = evaluate_json(folder, "--attacks", "pgd10", "--examples", 25, "--step-size", "2/255")
    assert 2 / 255 in stepped["protocol"]["attacks"]["pgd10"].values()


@pytest.mark.slow
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


@pytest.mark.parametrize("name", ["model.safetensors", "recipe.toml", "evaluation.md", "result"])
def test_a_result_replaces_no_other_kind_of_file(name, command, copy_of, contents):
    folder = copy_of()
    before = contents(folder)
    command("evaluate", folder, "--out", folder / name).sentence("ends in .json; got", name, status=2)
    assert contents(folder) == before


@pytest.mark.parametrize("out", ["", ".", "folder.json/"])
def test_a_result_is_no_folder(out, command, finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.json").mkdir()
    command("evaluate", finished, "--out", out).sentence("is a folder; add a file's name", status=2)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.json"]


@pytest.mark.usefixtures("no_forward_pass")
def test_a_place_that_takes_no_file_shows_before_the_work(command, finished):
    command("evaluate", finished, "--out", "/proc/result.json").sentence("(/proc/result.json)", status=1)


class BrokenPipe(io.StringIO):
    """A pipe whose reader has ended."""

    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["table", "json"])
@pytest.mark.parametrize("stream", ["broken pipe", "full disk"])
def test_a_result_that_cannot_be_shown_is_written(stream, options, command, copy_of):
    folder = copy_of()
    with BrokenPipe() if stream == "broken pipe" else open("/dev/full", "w") as out:
        assert command("evaluate", folder, *options, out=out).status == 1
    assert json.loads((folder / "evaluation.json").read_text())["n"] == 40
    assert (folder / "evaluation.md").exists()
    assert not (folder / "evaluation.progress.json").exists()


def test_no_examples_at_all(command, finished):
    assert command("evaluate", finished, "--examples", 0).status == 2


def test_not_the_folder_of_a_run(command, tmp_path):
    for folder, why in ((tmp_path, "it holds no recipe.toml"), (tmp_path / "none", "there is no such folder")):
        command("evaluate", folder).sentence(f"{folder} is not the folder of a run: {why}", status=1)
    command("evaluate", "hf:owner/name").sentence("is evaluated with --weights hf:owner/name --data NAME", status=1)


def test_an_unfinished_run(command, unfinished, contents):
    before = contents(unfinished)
    result = command("evaluate", unfinished)
    result.sentence("has not finished; continue with: atas train --resume --out", str(unfinished), status=1)
    assert contents(unfinished) == before


@pytest.mark.parametrize("content", [b"", b"garbage", None])
def test_damaged_weights(content, command, copy_of):
    folder = copy_of()
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-500] if content is None else content)
    command("evaluate", folder).sentence(str(weights), "cannot be read", status=1)


def test_weights_of_another_file(command, copy_of):
    folder = copy_of()
    save_file({"weight": torch.zeros(3)}, folder / "model.safetensors")
    result = command("evaluate", folder)
    assert result.status in (1, 2)
    result.sentence("model.safetensors", status=result.status)


def test_data_that_is_not_there(command, copy_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = copy_of()
    text = recipe_text(folder).replace('name = "digits"', 'name = "cifar10"')
    (folder / "recipe.toml").write_text(text)
    command("evaluate", folder, "--root", tmp_path / "none").sentence("atas data get cifar10", status=1)


def test_data_that_was_given_in_python(command, copy_of):
    folder = copy_of()
    text = recipe_text(folder).replace('name = "digits"', 'name = "given:mine"')
    (folder / "recipe.toml").write_text(text)
    command("evaluate", folder).sentence("given", "Python", status=2)


FEW = ["--attacks", "fgsm", "--examples", 40]
MINE = """
import torch
from safetensors.torch import load_file
from atas import models

def trained(num_classes, channels):
    model = models.create("small-cnn", num_classes, channels)
    model.load_state_dict(load_file("{weights}"))
    return model
"""


def test_a_page_and_a_line_for_a_paper(command, copy_of):
    folder = copy_of()
    result = command("evaluate", folder)
    found = json.loads((folder / "evaluation.json").read_text())
    page = (folder / "evaluation.md").read_text()
    assert found["sentence"] in result.out.splitlines()
    assert found["sentence"] in page
    assert result.out.splitlines()[-2] == f"written: {folder / 'evaluation.md'}"
    assert "| fgsm |" in page
    assert f"weights {found['weights']}" in found["sentence"]
    assert "95% intervals: clean " in found["sentence"]


@pytest.mark.slow
def test_autoattack_shows_its_stages(command, copy_of, monkeypatch):
    monkeypatch.setitem(
        auto_attack.VERSIONS,
        "standard",
        (APGD(loss="ce", iterations=5), APGD(loss="t", iterations=5), Square(queries=20)),
    )
    folder = copy_of()
    result = command("evaluate", folder, "--attacks", "autoattack,apgd-ce", "--examples", 20)
    assert result.status == 0, result.err
    for part in ("autoattack", "  after apgd-ce", "  after apgd-t", "  after square", "AutoAttack ", "APGD-CE "):
        assert part in result.out
    found = json.loads((folder / "evaluation.json").read_text())
    assert [stage["after"] for stage in found["stages"]["autoattack"]] == ["apgd-ce", "apgd-t", "square"]
    assert set(found["broken_by"]) == {"autoattack", "worst"}


@pytest.mark.slow
def test_a_file_of_weights(evaluate_json, copy_of, tmp_path):
    folder = copy_of()
    expected = evaluate_json(folder)
    save_file(load_file(folder / "model.safetensors"), tmp_path / "net.safetensors")  # without a word on the model
    options = ["--weights", tmp_path / "net.safetensors", "--model", "small-cnn", "--data", "digits", "--eps", "0.1"]
    found = evaluate_json(*options, *FEW)
    assert (found["correct"], found["weights"]) == (expected["correct"], expected["weights"])
    assert json.loads((tmp_path / "net-evaluation.json").read_text()) == found
    assert (tmp_path / "net-evaluation.md").exists()
    named = evaluate_json("--weights", folder / "model.safetensors", "--data", "digits", "--eps", 0.1, *FEW)
    assert named["correct"] == expected["correct"], "a file of ours knows its model"
    placed = evaluate_json(*options, *FEW, "--norm", "l2", "--out", tmp_path / "new" / "one.json")
    assert placed["threat"]["norm"] == "l2"
    assert json.loads((tmp_path / "new" / "one.json").read_text()) == placed


@pytest.mark.slow
def test_a_model_at_chance_is_noticed(command, evaluate_json, tmp_path):
    """As with weights of another model, or labels in another order."""
    save_file(models.create("small-cnn", 10, channels=1).state_dict(), tmp_path / "net.safetensors")
    given = ["--weights", tmp_path / "net.safetensors", "--model", "small-cnn", "--data", "digits"]
    given += ["--eps", "0.1", "--attacks", "fgsm", "--examples", "60"]
    assert "warning: this model answers at chance: its clean accuracy of " in command("evaluate", *given).out
    assert "chance" in [warning["kind"] for warning in evaluate_json(*given)["warnings"]]


def test_normalisation_of_weights_without_one(evaluate_json, copy_of, tmp_path):
    weights = {k: v for k, v in load_file(copy_of() / "model.safetensors").items() if not k.startswith("normalize")}
    save_file(weights, tmp_path / "net.safetensors")
    options = ["--weights", tmp_path / "net.safetensors", "--model", "small-cnn", "--data", "digits", "--eps", "0.1"]
    usual = evaluate_json(*options, *FEW)
    same = evaluate_json(*options, *FEW, "--mean", "0.5", "--std", "0.25")
    other = evaluate_json(*options, *FEW, "--mean", "0.1", "--std", "1")
    assert same["weights"] == usual["weights"]
    assert other["weights"] != usual["weights"], "the constants are part of the model"


@pytest.mark.slow
def test_a_model_of_one_s_own(evaluate_json, copy_of, tmp_path, monkeypatch):
    folder = copy_of()
    expected = evaluate_json(folder)
    (tmp_path / "my_networks.py").write_text(MINE.format(weights=folder / "model.safetensors"))
    monkeypatch.chdir(tmp_path)
    found = evaluate_json("--model", "my_networks:trained", "--data", "digits", "--eps", "0.1", *FEW)
    assert found["correct"] == expected["correct"]
    assert (tmp_path / "my_networks.trained-evaluation.json").exists()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_how_far_the_decoding_of_files_is(rank, command, tmp_path, monkeypatch):
    for half in ("train", "test"):
        for name in ("dark", "light"):
            (tmp_path / half / name).mkdir(parents=True)
            Image.new("L", (8, 8), 200 * (name == "light")).save(tmp_path / half / name / "0.png")
    monkeypatch.setattr(console.DataProgress, "plain_interval", 0.0)
    monkeypatch.setenv("RANK", rank)
    save_file(models.create("small-cnn", 2, 3).state_dict(), tmp_path / "weights.safetensors")
    files = ["--data", "imagefolder", "--root", str(tmp_path), "--size", "8", "--eps", "0.1", *FEW]
    done = command("evaluate", "--weights", str(tmp_path / "weights.safetensors"), "--model", "small-cnn", *files)
    assert done.status == 0, done.err
    assert ("decoding images: 2 of 2" in done.err) == (rank == "0")  # for training there is nothing to do


@pytest.mark.slow
def test_a_quick_look_does_not_replace_autoattack(evaluate_json, copy_of):
    folder = copy_of()
    few = ["--examples", "2"]
    own = evaluate_json(folder, "--attacks", "autoattack", *few)
    quick = evaluate_json(folder, "--attacks", "fgsm, pgd2", *few)
    assert json.loads((folder / "evaluation.json").read_text()) == own
    assert json.loads((folder / "evaluation-fgsm-pgd2.json").read_text()) == quick
    both = evaluate_json(folder, "--attacks", "fgsm,autoattack", *few)
    assert json.loads((folder / "evaluation.json").read_text()) == both


@pytest.mark.slow
def test_another_budget_goes_beside_the_run_s_own(evaluate_json, copy_of):
    folder = copy_of()
    own = evaluate_json(folder)
    other = evaluate_json(folder, "--eps", "51/255")
    assert other["threat"]["eps"] == 0.2
    assert json.loads((folder / "evaluation.json").read_text()) == own
    assert json.loads((folder / "evaluation-linf-0.2.json").read_text()) == other


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["pass a run folder, or --weights FILE or --model package.module:function"]),
        (["--model", "small-cnn", "--data", "digits", "--eps", "0.1"], ["'small-cnn' is untrained"]),
        (["--model", "a:b", "--eps", "0.1"], ["--data (cifar10, ...) is missing"]),
        (["--model", "a:b", "--data", "digits"], ["--eps (8/255, ...) is missing"]),
        (["--model", "a:b", "--data", "digits", "--eps", "8"], ["write 8/255 rather than 8"]),
        (["--model", "a:b", "--data", "digits", "--eps", "x"], ["--eps must be a number or a fraction"]),
        (["--model", "a:b", "--data", "digits", "--eps", "0.1", "--norm", "l7"], ["unknown norm 'l7'"]),
        (["--model", "no_such:b", "--data", "digits", "--eps", "0.1"], ["cannot import 'no_such'"]),
        (["--model", "a:b", "--data", "digitz", "--eps", "0.1"], ["did you mean 'digits'?"]),
        (["RUN", "--model", "small-cnn"], ["--model cannot be combined with a run folder"]),
        (["RUN", "--norm", "l2"], ["--norm l2 needs a budget"]),
        (["RUN", "--norm", "l3"], ["unknown norm 'l3'", "linf, l2"]),
        (
            ["RUN", "--attacks", "pgd2", "--step-size", "2"],
            ["step_size is in pixel units of [0, 1]: write 2/255 rather than 2"],
        ),
        (["RUN", "--precision", "float16"], ["unknown precision 'float16'", "auto, float32"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_use_of_the_new_options(arguments, parts, command, copy_of, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = copy_of()
    command("evaluate", *(folder if word == "RUN" else word for word in arguments)).sentence(*parts, status=2)


def test_weights_that_do_not_fit(command, tmp_path):
    save_file({"weight": torch.zeros(3)}, tmp_path / "net.safetensors")
    options = ["--weights", tmp_path / "net.safetensors", "--data", "digits", "--eps", "0.1"]
    command("evaluate", *options, "--model", "small-cnn").sentence("do not fit this model", status=1)
    command("evaluate", *options).sentence("net.safetensors", status=2)
    model = models.create("small-cnn", num_classes=3, channels=1)
    save_file(model.state_dict(), tmp_path / "three.safetensors")
    three = ["--weights", tmp_path / "three.safetensors", *options[2:], "--model", "small-cnn"]
    command("evaluate", *three).sentence("has the shape (3, ", "there and (10, ", "in the model", status=1)
    missing = ["--weights", tmp_path / "none.safetensors", *options[2:]]
    command("evaluate", *missing, "--model", "small-cnn").sentence(
        "there is no weights file", "none.safetensors", status=1
    )
    folder = ["--weights", tmp_path, *options[2:]]
    command("evaluate", *folder, "--model", "small-cnn").sentence("is a folder, not a weights file", status=1)


@pytest.mark.slow
def test_stopped_by_a_person_and_gone_on(command, evaluate_json, copy_of, monkeypatch):
    folder = copy_of()
    arguments = [folder, "--attacks", "pgd10,pgd50"]
    expected = evaluate_json(copy_of("other"), *arguments[1:])

    file = folder / "evaluation.progress.json"
    monkeypatch.setattr(evaluation, "evaluate", functools.partial(evaluation.evaluate, progress_interval=0.0))

    def stop(module, arguments):
        if file.exists():
            raise KeyboardInterrupt

    hook = register_module_forward_pre_hook(stop)
    result = command("evaluate", *arguments)
    hook.remove()
    result.sentence(f"interrupted; the same command resumes from {file}", status=1)
    assert file.exists()
    result = command("evaluate", *arguments)
    assert result.status == 0
    assert result.err.strip() == f"resuming from {file}"
    assert not file.exists()
    assert json.loads((folder / "evaluation.json").read_text())["correct"] == expected["correct"]


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".md", ".json"])
def test_progress_is_kept_until_the_result_is_written(command, evaluate_json, copy_of, monkeypatch, suffix):
    folder, options = copy_of(), ["--attacks", "pgd10"]
    file = folder / "evaluation.progress.json"
    save_always = functools.partial(evaluation.evaluate, progress_interval=0.0)
    monkeypatch.setattr(evaluation, "evaluate", save_always)
    expected = evaluate_json(copy_of("other"), *options)
    replace = Path.replace

    def full(temporary, path):
        if path.suffix == suffix and path != file:
            raise OSError(28, "No space left on device")
        return replace(temporary, path)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        assert command("evaluate", folder, *options).status == 1
    assert file.exists()
    found = command("evaluate", folder, *options)
    assert found.err.strip() == f"resuming from {file}"
    assert not file.exists()
    assert json.loads((folder / "evaluation.json").read_text())["correct"] == expected["correct"]


@pytest.mark.slow
def test_under_torchrun_the_first_process_writes(evaluate_json, copy_of):
    folder, options = copy_of(), ["--attacks", "fgsm,pgd10", "--examples", "21"]
    expected = evaluate_json(copy_of("other"), *options)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "atas"]
    done = subprocess.run(
        [*command, "evaluate", str(folder), *options],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("written: ") == 2
    found = json.loads((folder / "evaluation.json").read_text())
    assert found["protocol"]["processes"] == 2
    assert (found["correct"], found["data"]) == (expected["correct"], expected["data"])


# Two at once


@pytest.fixture
def during(monkeypatch):
    """Call a function once, as the first evaluation begins to attack."""

    def call(function):
        evaluate = evaluation.evaluate

        def first(*arguments, **options):
            monkeypatch.setattr(evaluation, "evaluate", evaluate)
            function()
            return evaluate(*arguments, **options)

        monkeypatch.setattr(evaluation, "evaluate", first)

    return call


def test_another_evaluation_into_the_same_file_is_refused(command, copy_of, during, monkeypatch):
    """Both would write one progress file, and the second result would replace the first."""
    monkeypatch.setattr(files, "LOCK_TIMEOUT", 0.0)
    folder, second = copy_of(), []
    during(lambda: second.append(command("evaluate", folder, "--attacks", "pgd10")))
    assert command("evaluate", folder).status == 0
    (refused,) = second
    refused.sentence(f"another process evaluates into {folder / 'evaluation.json'}; wait for it, or name", status=1)
    assert set(json.loads((folder / "evaluation.json").read_text())["accuracy"]) == {"clean", "fgsm", "worst"}
    assert not list(folder.glob(".*")), "the lock is removed"
    assert command("evaluate", folder, "--attacks", "pgd10").status == 0


def test_another_evaluation_into_another_file_is_not(command, copy_of, during, tmp_path):
    folder, second = copy_of(), []
    during(lambda: second.append(command("evaluate", folder, "--attacks", "pgd10", "--out", tmp_path / "other.json")))
    assert command("evaluate", folder).status == 0
    assert second[0].status == 0, second
    assert "pgd10" in json.loads((tmp_path / "other.json").read_text())["accuracy"]
    assert "fgsm" in json.loads((folder / "evaluation.json").read_text())["accuracy"]


def test_a_better_result_that_was_written_while_the_lock_was_waited_for_is_kept(command, copy_of, monkeypatch):
    folder, first = copy_of(), []
    lock = files.file_lock

    def waited(path, sentence):
        monkeypatch.setattr(files, "file_lock", lock)
        first.append(command("evaluate", folder))
        return lock(path, sentence)

    monkeypatch.setattr(files, "file_lock", waited)
    assert command("evaluate", folder, "--examples", 10).status == 0
    assert first[0].status == 0
    assert json.loads((folder / "evaluation.json").read_text())["n"] == 40
    assert json.loads((folder / "evaluation-10.json").read_text())["n"] == 10


SILENT = """
from torch import nn


class Silent(nn.Sequential):
    def train(self, mode=True):
        super().train(mode)


def build(num_classes, channels):
    return Silent(nn.Flatten(), nn.Linear(channels * 64, num_classes))
"""


def test_a_model_whose_train_returns_nothing(command, tmp_path, monkeypatch):
    (tmp_path / "silent_net.py").write_text(SILENT)
    monkeypatch.chdir(tmp_path)
    given = ("--data", "digits", "--eps", 0.1, "--attacks", "fgsm", "--examples", 10)
    result = command("evaluate", "--model", "silent_net:build", *given)
    assert result.status == 0, result


def test_a_file_is_not_the_folder_of_a_run(command, finished):
    weights = finished / "model.safetensors"
    command("evaluate", weights).sentence(f"{weights} is a file, not a run folder", f"--weights {weights}", status=2)
    command("export", weights, "--to", "safetensors").sentence(
        f"{weights} is not the folder of a run: it is a file", status=1
    )


def test_no_attack_is_not_the_default(command, finished):
    command("evaluate", finished, "--attacks", ",").sentence("--attacks is empty; pass values", status=2)
