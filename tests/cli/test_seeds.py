"""Several seeds of one recipe, and folders of runs: train, evaluate, compare, report."""

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
from dataclasses import replace

import pytest
from PIL import Image
from safetensors.torch import load_file

from atas import cli
from atas.training import Run


def weights(folder):
    return {name: tensor.tolist() for name, tensor in load_file(folder / "model.safetensors").items()}


@pytest.fixture(scope="session")
def trained(tmp_path_factory, finished):
    """The folder of seeds 0 and 4, not evaluated; not to be changed."""
    import atas

    folder = tmp_path_factory.mktemp("groups") / "group"
    for seed in (0, 4):
        live = atas.training.TrainingProgress(quiet=True)
        atas.train(finished.parent / "tiny.toml", out=folder / f"seed-{seed}", seed=seed, live=live)
    return folder


@pytest.fixture
def group(trained, tmp_path):
    """A copy of it to do things to."""
    return shutil.copytree(trained, tmp_path / "group")


@pytest.fixture
def evaluated(group, command):
    assert command("evaluate", group).status == 0
    return group


# Training


@pytest.mark.slow
def test_each_seed_is_trained_into_a_folder_of_its_own(command, tiny, tmp_path, trained):
    result = command("train", tiny, "--seeds", "0,4", "--out", tmp_path / "x")
    assert result.status == 0, result.err
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == ["seed-0", "seed-4"]
    for seed in (0, 4):
        assert Run.load(tmp_path / "x" / f"seed-{seed}").recipe.training.seed == seed
        assert weights(tmp_path / "x" / f"seed-{seed}") == weights(trained / f"seed-{seed}")
    assert "seed 2 of 2  epoch 1/1" in result.out
    assert result.out.splitlines()[-1] == f"done: {tmp_path / 'x'}; next: atas evaluate {tmp_path / 'x'}"


@pytest.mark.slow
def test_seeds_are_evaluated_and_told_to_programs(command, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = command("train", tiny, "--seeds", "3,1", "--evaluate", "--json")
    found = json.loads(result.out)
    assert (found["folder"], [run["seed"] for run in found["runs"]]) == ("runs/tiny", [3, 1])
    assert "seed 1 of 2" in result.err
    single = [run["evaluation"]["accuracy"]["fgsm"] for run in found["runs"]]
    assert found["over_seeds"]["fgsm"] == {
        "mean": pytest.approx(statistics.fmean(single)),
        "min": pytest.approx(min(single)),
        "max": pytest.approx(max(single)),
        "sd": pytest.approx(statistics.stdev(single)),
        "seeds": 2,
        "n": 40,
    }


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["TINY", "--seeds", "0,1", "--seed", "2"], ["--seeds gives every run its seed"]),
        (["TINY", "--seeds", "0", "--set", "training.seed=2"], ["--seeds gives every run its seed"]),
        (["TINY", "--seeds", "a"], ["--seeds takes integers separated by commas; got 'a'"]),
        (["TINY", "--seeds", ","], ["--seeds is empty"]),
        (["--seeds", "0,1", "--resume", "--out", "x"], ["--seeds needs the recipe too"]),
        (["TINY", "--seeds", "4,7", "--out", "GROUP"], ["there is a run in", "seed-4 already", "--resume"]),
        (["TINY", "--seeds", "4", "--out", "GROUP", "--resume", "--overwrite"], ["leave one of them out"]),
        (["TINY", "--seeds", "4", "--out", "FIRST"], ["is the folder of one run"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_a_mistake_with_seeds(arguments, parts, command, tiny, trained, finished, contents):
    before = contents(trained.parent)
    given = [{"TINY": tiny, "GROUP": trained, "FIRST": finished}.get(word, word) for word in arguments]
    command("train", *given).sentence(*parts, status=2)
    assert contents(trained.parent) == before


@pytest.mark.slow
def test_resume_skips_finished_seeds_and_their_evaluations(command, tiny, evaluated):
    kept = {
        path: path.read_bytes() for path in evaluated.rglob("*") if path.name in ("model.safetensors", "evaluation.md")
    }
    told = command("train", tiny, "--seeds", "0,4,5", "--out", evaluated, "--resume", "--evaluate").out
    assert told.count("has finished already") == 2
    assert told.count("evaluated already") == 2
    assert told.count("Accuracy in percent") == 3, "a sentence for a paper, also for what was evaluated already"
    assert "seed 3 of 3  epoch 1/1" in told
    assert {path: path.read_bytes() for path in kept} == kept
    assert (evaluated / "seed-5" / "evaluation.json").exists()
    assert "group, 3 seeds" in told


@pytest.mark.slow
def test_ctrl_c_stops_one_seed_and_resume_continues_with_it(tiny, tmp_path, command):
    longer = ["--set", "training.epochs=4", "--seeds", "0,1"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert command("train", tiny, *longer, "--out", whole).status == 0
    running = subprocess.Popen(
        [sys.executable, "-m", "atas", "train", str(tiny), *longer, "--out", str(stopped)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while not running.stdout.readline().startswith("seed 2 of 2  epoch 1/4"):
            assert running.poll() is None
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 1
    assert err == (
        f"atas: stopped in seed 2 of 2, into {stopped / 'seed-1'}; continue with the same command and --resume\n"
    )
    result = command("train", tiny, *longer, "--out", stopped, "--resume")
    assert result.status == 0, result.err
    assert weights(stopped / "seed-1") == weights(whole / "seed-1")


def test_a_group_is_not_the_folder_of_a_run(command, trained):
    for given in (["train", "--resume", "--out"], ["export", "--to", "safetensors"]):
        command(*given, trained).sentence(f"{trained} holds several runs; pass the folder of one, such as", status=1)


# Evaluation


def test_a_group_is_evaluated_run_by_run_with_a_table_over_seeds(command, group):
    told = command("evaluate", group).out
    assert told.index("seed-0:") < told.index("seed-4:") < told.index("group, 2 seeds")
    rows = {words[0]: words for line in told.partition("group, 2 seeds")[2].splitlines() if (words := line.split())}
    single = [
        100 * json.loads((group / f"seed-{seed}" / "evaluation.json").read_text())["accuracy"]["fgsm"]
        for seed in (0, 4)
    ]
    mean, low, high = statistics.fmean(single), min(single), max(single)
    deviation = statistics.stdev(single)
    assert rows["fgsm"] == ["fgsm", f"{mean:.2f}", f"{low:.2f}", "to", f"{high:.2f}", f"{deviation:.2f}", "2"]


@pytest.mark.slow
def test_what_was_evaluated_is_not_evaluated_again(command, evaluated):
    assert command("evaluate", evaluated).out.count("evaluated already") == 2
    for other in (["--seed", "1"], ["--attacks", "fgsm,pgd2"], ["--examples", "39"], ["--eps", "0.2"]):
        assert "evaluated already" not in command("evaluate", evaluated, *other).out, other
    shutil.copy(evaluated / "seed-0" / "model.safetensors", evaluated / "seed-4" / "model.safetensors")
    assert command("evaluate", evaluated, "--attacks", "fgsm,pgd2").out.count("evaluated already") == 1


QUESTIONS = [("--target-class", "3"), ("--mask", "MASK"), ("--corruptions", "contrast")]


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question[0])
def test_the_result_of_another_question_is_not_used_again(question, command, group, tmp_path):
    Image.new("L", (8, 8), 255).save(tmp_path / "mask.png")  # all white: verdicts are those without a mask
    asked = [str(tmp_path / "mask.png") if word == "MASK" else word for word in question]
    first = group / "seed-0"
    assert command("evaluate", first, *asked, "--out", first / "evaluation.json").status == 0
    assert "evaluated already" not in command("evaluate", group).out
    assert command("evaluate", group).out.count("evaluated already") == 2


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question[0])
def test_a_plain_result_does_not_answer_another_question(question, evaluated, tmp_path, monkeypatch):
    from atas.cli.evaluate import EvaluateOptions
    from atas.cli.seeds import evaluate_once
    from atas.cli.target import from_run

    Image.new("L", (8, 8), 255).save(tmp_path / "mask.png")
    folder, name = evaluated / "seed-0", question[0].removeprefix("--").replace("-", "_")
    value = tmp_path / "mask.png" if name == "mask" else question[1]
    options = EvaluateOptions(out=folder / "evaluation.json", quiet=True)
    monkeypatch.setattr("atas.cli.seeds.evaluate_target", lambda *_, **__: None)
    assert evaluate_once(from_run(Run.load(folder), options), show="nothing") is not None
    asked = from_run(Run.load(folder), replace(options, **{name: value}))
    assert evaluate_once(asked, show="nothing") is None


def test_the_results_of_a_group_as_json(command, group):
    found = json.loads(command("evaluate", group, "--json").out)[str(group)]
    assert list(found["runs"]) == ["seed-0", "seed-4"]
    assert {name: stats["seeds"] for name, stats in found["over_seeds"].items()} == {"clean": 2, "fgsm": 2, "worst": 2}
    assert found["runs"]["seed-4"]["n"] == 40


def test_a_group_has_no_single_file_of_results(command, trained, tmp_path):
    command("evaluate", trained, "--out", tmp_path / "x.json").sentence("--out names one file", status=2)


def test_a_seed_that_is_not_finished_is_seen_before_the_evaluation(command, group, no_forward_pass):
    (group / "seed-4" / "model.safetensors").unlink()
    command("evaluate", group).sentence("seed-4 has not finished; continue with", status=1)


@pytest.mark.slow
def test_a_folder_of_runs_is_evaluated_whole(command, group, copy_of):
    copy_of("first")
    told = command("evaluate", group.parent).out
    assert re.findall(r"(\S+):$", told, re.MULTILINE) == [
        str(group.parent / name) for name in ("first", "group/seed-0", "group/seed-4")
    ]


def test_quiet_prints_the_result_alone(command, group, tiny, tmp_path):
    told = command("evaluate", group / "seed-0", "-q")
    assert told.err == ""
    assert "fgsm" in told.out
    told = command("train", tiny, "--out", tmp_path / "run", "--quiet")
    assert (told.err, told.out) == ("", f"done: {tmp_path / 'run'}; next: atas evaluate {tmp_path / 'run'}\n")


# Comparison and report


def test_a_group_is_one_row(command, evaluated, copy_of):
    copy_of("first")
    out = command("compare", evaluated.parent).out
    rows = {words[0]: words for line in out.splitlines() if (words := line.split())}
    assert {"first", "group"} <= set(rows)
    assert "seed-0" not in rows
    assert rows["group"][3] == "2"
    assert "[ ]: the range over seeds" in out
    single = command("compare", evaluated, "--each").out
    assert "seed-0" in single
    assert "seed-4" in single


def test_a_group_as_json(command, evaluated):
    (row,) = json.loads(command("compare", evaluated, "--json").out)
    assert (row["run"], row["seeds"], row["n"], row["collapsed"]) == ("group", [0, 4], 40, 0)
    single = [run["accuracy"]["clean"] for run in row["runs"]]
    assert row["over_seeds"]["clean"]["mean"] == pytest.approx(statistics.fmean(single))
    assert (row["over_seeds"]["clean"]["min"], row["over_seeds"]["clean"]["max"]) == pytest.approx(
        (min(single), max(single))
    )


def test_attacks_that_only_one_seed_has(command, evaluated):
    command("evaluate", evaluated / "seed-4", "--attacks", "fgsm,pgd2")
    assert "1 of 2 seeds" in command("compare", evaluated).out
    (row,) = json.loads(command("compare", evaluated, "--json").out)
    assert {name: stats["seeds"] for name, stats in row["over_seeds"].items()} == {"clean": 2, "fgsm": 2, "pgd2": 1}


def test_seeds_of_two_recipes_have_no_mean(command, group):
    recipe = group / "seed-4" / "recipe.toml"
    lines = recipe.read_text().replace("batch_size = 512", "batch_size = 500").splitlines(keepends=True)
    recipe.write_text("".join([lines[0], *lines[2:]]))
    for made in (["compare"], ["report"]):
        command(*made, group).sentence("differ in more than the seed (training.batch_size: 512 became 500", status=1)
    assert command("compare", group, "--each").status == 0


@pytest.mark.slow
def test_the_report_of_a_group(command, evaluated, copy_of):
    told = command("report", evaluated)
    assert told.out == f"report: {evaluated / 'report.html'}\n"
    page = (evaluated / "report.html").read_text()
    for part in ("group: 2 seeds", "How much do seeds matter?", "over 2 seeds", "Each run", "seed-4"):
        assert part in page
    assert command("report", evaluated, copy_of("first"), "--out", evaluated / "both.html").status == 0
    assert "3 runs compared" in (evaluated / "both.html").read_text()


def test_help_is_the_same_in_words():
    """`--quiet`, `--json` and `--trust` mean the same everywhere."""
    import typer

    said = {}
    for command in typer.main.get_command(cli.app).commands.values():
        for parameter in command.params if not hasattr(command, "commands") else ():
            if (name := parameter.opts[-1]) in ("--quiet", "-q", "--trust"):
                said.setdefault(name, set()).add(parameter.help)
    assert all(len(texts) == 1 for texts in said.values()), said
