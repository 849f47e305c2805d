"""`atas train`: what it makes, and what a mistake is answered with."""

import os
import resource
import signal
import subprocess
import sys

import pytest
from safetensors.torch import load_file

from atas import recipes
from atas.training import Run


@pytest.mark.slow
def test_a_run_from_a_recipe_file(command, tiny, tmp_path):
    result = command("train", tiny, "--out", tmp_path / "run", "--set", "method.eps=8/255", "--seed", 3)
    assert result.status == 0, result.err
    assert result.err == ""
    first, epoch, *_ = result.out.splitlines()
    assert first.startswith(f"{tiny.stem}: ")
    assert "Linf(8/255), 1,297 images of digits x 1; cpu" in first
    assert first.endswith(f"eager in float32; into {tmp_path / 'run'}")
    assert epoch.startswith("epoch 1/1")
    run = Run.load(tmp_path / "run")
    assert (run.recipe.method.eps, run.recipe.training.seed) == (8 / 255, 3)
    assert len(run.metrics) == 1


@pytest.mark.slow
def test_the_last_line_says_what_is_next_in_one_piece(command, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    folder = tmp_path / ("a-long-name-" * 6) / "run"
    result = command("train", tiny, "--out", folder)
    assert result.out.splitlines()[-1] == f"done: {folder}; next: atas evaluate {folder}"


@pytest.mark.slow
def test_evaluate_after_training(command, tiny, tmp_path):
    result = command("train", tiny, "--out", tmp_path / "run", "--evaluate")
    assert result.status == 0, result.err
    assert "clean" in result.out
    assert (tmp_path / "run" / "evaluation.json").exists()


@pytest.mark.slow
def test_values_of_all_kinds(command, tiny, tmp_path):
    values = [
        "training.batch_size=700",
        "data.flip=true",
        'evaluation.attacks=["fgsm", "pgd10"]',
        "method.name=fgsm-rs",
        "method.step_size=12/255",
        "schedule.milestones=[0.5]",
        "data.root=/some/where",
    ]
    result = command("train", tiny, "--out", tmp_path / "run", *[part for v in values for part in ("--set", v)])
    assert result.status == 0, result.err
    made = Run.load(tmp_path / "run").recipe
    assert (made.training.batch_size, made.data.flip, made.evaluation.attacks) == (700, True, ("fgsm", "pgd10"))
    assert (made.method.name, dict(made.method.settings)) == ("fgsm-rs", {"step_size": 12 / 255})
    assert (made.schedule.milestones, made.data.root) == ((0.5,), "/some/where")


@pytest.mark.slow
def test_the_saved_recipe_is_a_recipe(command, tiny, tmp_path):
    command("train", tiny, "--out", tmp_path / "one", "--seed", 5)
    result = command("train", tmp_path / "one" / "recipe.toml", "--out", tmp_path / "two")
    assert result.status == 0, result.err
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert all(bool((one[name] == two[name]).all()) for name in one)
    assert recipes.load(tmp_path / "one" / "recipe.toml") == recipes.load(tmp_path / "two" / "recipe.toml")


# Mistakes: one sentence, and nothing is lost or left behind


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["digits-small-cnn-attas"], ["unknown recipe 'digits-small-cnn-attas'; did you mean 'digits-small-cnn-at"]),
        (["none.toml"], ["there is no recipe file none.toml", "atas ls recipes"]),
        ([], ["pass a recipe"]),
        (["TINY", "--set", "method.name=atass"], ["unknown method 'atass'; did you mean 'atas'?"]),
        (["TINY", "--set", "model.name=smal-cnn"], ["unknown model 'smal-cnn'; did you mean 'small-cnn'?"]),
        (["TINY", "--set", "data.name=cifar"], ["unknown data set 'cifar'; did you mean 'cifar10'?"]),
        (
            ["TINY", "--set", "training.epoch=3"],
            ["unknown recipe key 'training.epoch'; did you mean 'training.epochs'?"],
        ),
        (["TINY", "--set", "trainin.epochs=3"], ["unknown section", "did you mean 'training'?"]),
        (
            ["TINY", "--set", "epochs=3"],
            ["'epochs=3' is not an assignment; write section.key=value; did you mean --set training.epochs=3?"],
        ),
        (["TINY", "--set", "max_steps=0.1"], ["did you mean --set method.max_step=0.1?"]),
        (["TINY", "--set", "method.max_steps=0.1"], ["did you mean 'method.max_step'?"]),
        (["TINY", "--set", "training.peek=0.1"], ["did you mean 'schedule.peak'?"]),
        (["TINY", "--set", "sgd.lr=0.1"], ["unknown recipe key 'sgd.lr'; did you mean 'schedule.peak'?"]),
        (["TINY", "--set", "training.epochs"], ["is not an assignment"]),
        (["TINY", "--set", "training.epochs=ten"], ["training.epochs must be a whole number; got 'ten'"]),
        (["TINY", "--set", "training.epochs=0"], ["training.epochs must be at least 1; got 0"]),
        (["TINY", "--set", "method.eps=-8/255"], ["eps must be a number that is not negative"]),
        (["TINY", "--set", "method.eps=8"], ["8/255"]),
        (["TINY", "--set", "method.c=-1"], ["c > 0"]),
        (["TINY", "--set", "method.c=much"], ["much"]),
        (["TINY", "--set", "method.replays=3"], ["unknown recipe key 'method.replays': that is a setting of free."]),
        (["TINY", "--set", "training.on_collapse=panic"], ["training.on_collapse", "'panic'"]),
        (["TINY", "--set", "engine.device=tpu9"], ["there is no device 'tpu9'; use auto, cpu or cuda"]),
        (["TINY", "--set", "model.name=no_such_module:build"], ["cannot import 'no_such_module'"]),
        (["TINY", "--set", "evaluation.attacks=['pgd0']"], ["pgd0"]),
        (["TINY", "--seed", "5", "--set", "training.seed=6"], ["the seed is 5 and training.seed is 6; pass one of"]),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else "",
)
def test_wrong_use_is_one_sentence(arguments, parts, command, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = command("train", *[tiny if word == "TINY" else word for word in arguments], "--out", tmp_path / "run")
    result.sentence(*parts, status=2)
    assert not (tmp_path / "run").exists()


def test_data_that_is_not_there(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATAS_DATA", raising=False)
    result = command("train", "cifar10-preact-resnet18-atas", "--out", tmp_path / "run")
    result.sentence("cifar10", "atas data get cifar10", status=1)
    assert not (tmp_path / "run").exists()


def test_a_damaged_data_file(command, tmp_path):
    (tmp_path / "data" / "cifar-10-batches-bin").mkdir(parents=True)
    for name in ("data_batch_1.bin", "data_batch_2.bin", "test_batch.bin"):
        (tmp_path / "data" / "cifar-10-batches-bin" / name).write_bytes(b"short")
    result = command(
        "train", "cifar10-preact-resnet18-atas", "--set", f"data.root={tmp_path / 'data'}", "--out", tmp_path / "run"
    )
    result.sentence(str(tmp_path / "data"), status=1)


def test_a_folder_of_something_else(command, tiny, tmp_path, contents):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_bytes(b"meow")
    before = contents(tmp_path / "photos")
    for more in ([], ["--overwrite"]):
        result = command("train", tiny, "--out", tmp_path / "photos", *more, "--set", "method.eps=-1")
        assert result.status == 2
    result = command("train", tiny, "--out", tmp_path / "photos")
    result.sentence("not empty and not the folder of a run", status=2)
    assert contents(tmp_path / "photos") == before


def test_a_folder_of_a_run(command, tiny, copy_of, contents):
    folder = copy_of()
    before = contents(folder)
    result = command("train", tiny, "--out", folder)
    result.sentence("there is a run in", "--resume", "--overwrite", "--out", status=2)
    assert contents(folder) == before


def test_a_file_in_the_place_of_the_folder(command, tiny, tmp_path):
    (tmp_path / "file").write_text("mine")
    command("train", tiny, "--out", tmp_path / "file").sentence(
        f"{tmp_path / 'file'} is a file, not the folder of a run", status=2
    )
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.slow
def test_overwrite(command, tiny, copy_of):
    folder = copy_of()
    result = command("train", tiny, "--out", folder, "--overwrite", "--seed", 9)
    assert result.status == 0, result.err
    assert Run.load(folder).recipe.training.seed == 9


@pytest.mark.slow
@pytest.mark.parametrize(
    "assignment",
    ["data.name=cifar10", "model.name=smal-cnn", "method.c=-1", "method.max_step=16", "engine.device=tpu9"],
)
def test_a_mistake_with_overwrite_loses_nothing(assignment, command, tiny, copy_of, contents, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATAS_DATA", raising=False)
    folder = copy_of()
    before = contents(folder)
    result = command("train", tiny, "--out", folder, "--overwrite", "--set", assignment)
    assert result.status in (1, 2)
    assert contents(folder) == before


def test_resume_with_a_changed_recipe(command, tiny, copy_of, contents):
    folder = copy_of()
    before = contents(folder)
    result = command("train", tiny, "--out", folder, "--resume", "--set", "training.batch_size=100")
    result.sentence("training.batch_size: 512 became 100", f"atas train --resume --out {folder}", status=2)
    assert contents(folder) == before


def test_resume_and_overwrite_contradict_each_other(command, tiny, copy_of, contents):
    folder = copy_of()
    before = contents(folder)
    for given in ([tiny], []):
        result = command("train", *given, "--out", folder, "--resume", "--overwrite")
        result.sentence("--resume continues a run and --overwrite deletes it", status=2)
    assert contents(folder) == before


def test_resume_of_a_finished_run(command, copy_of):
    folder = copy_of()
    weights = load_file(folder / "model.safetensors")
    metrics = (folder / "metrics.jsonl").read_bytes()
    result = command("train", "--resume", "--out", folder)
    assert result.status == 0, result.err
    assert "epoch 1/1" not in result.out
    assert (folder / "metrics.jsonl").read_bytes() == metrics
    assert all(
        bool((tensor == weights[name]).all()) for name, tensor in load_file(folder / "model.safetensors").items()
    )


@pytest.mark.parametrize("content", [None, b"garbage"], ids=["missing", "damaged"])
def test_resume_writes_lost_weights_of_a_finished_run_anew(content, command, copy_of, finished):
    folder = copy_of()
    weights = folder / "model.safetensors"
    weights.unlink()
    if content is not None:
        weights.write_bytes(content)
    remedy = f"atas train --resume --out {folder}"
    assert remedy in command("evaluate", folder).sentence(status=1)
    result = command("train", "--resume", "--out", folder)
    assert "has finished already; its weights, missing or damaged, are restored from the last" in result.out
    assert weights.read_bytes() == (finished / "model.safetensors").read_bytes()
    assert "restored" not in command("train", "--resume", "--out", folder).out


def test_resume_of_nothing(command, tmp_path):
    command("train", "--resume", "--out", tmp_path / "none").sentence("there is no such folder", status=1)
    command("train", "--resume").sentence("pass a recipe", status=2)


@pytest.mark.parametrize("content", [b"", b"garbage", None], ids=["empty", "garbage", "torn"])
def test_resume_from_a_damaged_checkpoint(content, command, copy_of, contents):
    folder = copy_of()
    last = folder / "checkpoints" / "last.safetensors"
    last.write_bytes(last.read_bytes()[:-1000] if content is None else content)
    before = contents(folder)
    result = command("train", "--resume", "--out", folder)
    result.sentence(str(last), "damaged", "--overwrite", status=1)
    assert contents(folder) == before


@pytest.mark.slow
def test_resume_from_a_foreign_checkpoint(command, copy_of, tiny, tmp_path):
    folder = copy_of()
    result = command("train", tiny, "--out", tmp_path / "other", "--set", "method.name=fgsm")
    assert result.status == 0, result.err
    last = folder / "checkpoints" / "last.safetensors"
    last.write_bytes((tmp_path / "other" / "checkpoints" / "last.safetensors").read_bytes())
    command("train", "--resume", "--out", folder).sentence("belongs to another run or model", status=1)


def test_a_recipe_that_is_no_text(command, copy_of):
    command("train", copy_of() / "model.safetensors").sentence("model.safetensors", status=2)


def test_a_seed_that_no_generator_takes(command, tiny, tmp_path):
    result = command("train", tiny, "--out", tmp_path / "run", "--seed", 2**70)
    result.sentence("seed", status=2)


# True processes


@pytest.mark.slow
def test_a_full_disk_in_a_process(tiny, tmp_path, process, command, contents):
    """The kernel refuses to let the checkpoint grow beyond a limit; afterwards there is room again."""
    folder = tmp_path / "run"
    small = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))}
    result = process("train", tiny, "--out", folder, "--set", "training.checkpoint_every=0", **small)
    result.sentence("cannot write the checkpoint", "make room on the disk", "continue with --resume", status=1)
    assert not [path for path in contents(folder) if path.name.endswith(".tmp")]
    assert command("train", "--resume", "--out", folder).status == 0
    Run.load(folder)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["closed", "full"])
def test_the_training_goes_on_where_its_output_is_lost(lost, tiny, tmp_path):
    if lost == "full":
        output = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, output = os.pipe()
        os.close(reader)
    train = [sys.executable, "-m", "atas", "train", str(tiny), "--out", str(tmp_path / "run")]
    done = subprocess.run(
        train, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=output, stderr=subprocess.PIPE, text=True, timeout=120
    )
    os.close(output)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("atas: cannot write output: ")
    assert done.stderr.count("\n") == 1
    Run.load(tmp_path / "run")


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_go_on(tiny, tmp_path):
    train = [sys.executable, "-m", "atas", "train", str(tiny), "--set", "training.epochs=2000", "--out", "run"]
    running = subprocess.Popen(
        train,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert running.stdout.readline().startswith("tiny: atas, ")
        assert running.stdout.readline().startswith("epoch ")
        running.send_signal(signal.SIGINT)
        _, err = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 1
    assert err.startswith("atas: stopped after batch ")
    assert err.count("\n") == 1
    assert "the run is saved, continue with: atas train --resume --out run" in err
    assert (tmp_path / "run" / "checkpoints" / "last.safetensors").exists()
