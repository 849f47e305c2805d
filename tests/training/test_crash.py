"""SIGKILL at random moments, in the middle of writes too: the run goes on and ends with the same bits."""

import signal

import pytest

SCRIPT = """
import json, os, random, sys
from pathlib import Path
import torch

torch.set_num_threads(1)
import torch.utils.tensorboard  # the import is slow; let it be done before the fork
from rich.console import Console
from torch import nn

import atas
from atas.training import TrainingProgress; from atas import recipes
from helpers.probes import one_collapse
from helpers.crash import attempt, count_calls, die_at_call, die_in_write

order = json.loads(sys.argv[1])
chance = random.Random(order["seed"])
generator = torch.Generator().manual_seed(0)
images = torch.rand(100, 1, 8, 8, generator=generator)
labels = torch.arange(100) % 3
data = atas.data.from_arrays("noise", images, labels, images[:10], labels[:10])
settings = recipes.load(order["recipe"])


def train(out, *, die=lambda: None):
    die()
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3))
    live = TrainingProgress(Console(file=open(os.devnull, "w")))
    probe = None if order["collapse_in"] is None else one_collapse(Path(out), order["collapse_in"])
    atas.train(settings, out=out, model=net, data=data, resume=True, live=live, probe=probe)


def killed(in_write):
    if in_write:
        sync = chance.randint(1, 15)
        die = lambda: die_in_write(sync)
    else:
        call = int(chance.uniform(0.3, 1) * calls / 3)
        die = lambda: die_at_call(call)
    code = attempt(lambda: train(order["killed"], die=die))
    assert code in (0, -9), code
    return code == -9


calls = count_calls(lambda: train(order["whole"]))
kills = 0
while kills < order["most_kills"] and killed(in_write=kills % 2):
    kills += 1
assert attempt(lambda: train(order["killed"])) == 0
print(json.dumps({"kills": kills}))
"""


@pytest.fixture
def run_killed(run_script, tmp_path):
    """Train with a recipe, whole and killed on the way; how often it was."""

    def run(recipe, **order):
        (tmp_path / "toy.toml").write_text(recipe.to_toml())
        usual = {"collapse_in": None, "most_kills": 12}
        return run_script(SCRIPT, recipe=str(tmp_path / "toy.toml"), **{**usual, **order})["kills"]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("method", ["atas", "free"])
def test_killed_at_random_moments(method, tmp_path, toy_recipe, run_killed, assert_same_run):
    """A checkpoint is written after every step; half of the kills come in the middle of a write."""
    values = {"training.checkpoint_every": 0.0, "training.epochs": 6, "training.ema": 0.9}
    assert run_killed(toy_recipe(method, values)) >= 3
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.parametrize("on_collapse", ["rollback", "stop"])
def test_killed_around_a_collapse(on_collapse, tmp_path, toy_recipe, run_killed, assert_same_run, rows_of):
    values = {"training.checkpoint_every": 0.0, "training.epochs": 6, "training.on_collapse": on_collapse}
    assert run_killed(toy_recipe("atas", values), collapse_in=3) >= 3
    assert [row["event"] for row in rows_of(tmp_path / "killed") if "event" in row] == ["collapse", on_collapse]
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.slow
def test_killed_with_rare_checkpoints(tmp_path, toy_recipe, run_killed, assert_same_run):
    """Most of these kills come before the first checkpoint or long after the last."""
    values = {"training.checkpoint_every": 0.1, "training.epochs": 6}
    run_killed(toy_recipe("fgsm-rs", values), most_kills=8)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


COMMAND = """
import json, sys
import torch

torch.set_num_threads(1)
import torch.utils.tensorboard  # the import is slow; let it be done before the fork
from atas import cli
from helpers.crash import attempt, count_calls, die_at_call, die_in_write

order = json.loads(sys.argv[1])


def train(name, die=lambda: None):
    sys.argv = ["atas", "train", *order["arguments"], "--out", order[name], "--resume"]
    sys.stdout = sys.stderr  # the answer alone goes to standard output
    die()
    try:
        cli.main()
    except SystemExit as end:
        return end.code


calls = count_calls(lambda: train("whole"))
deaths = [lambda: die_in_write(12), lambda: die_in_write(21), lambda: die_at_call(calls // 3)]
print(json.dumps([attempt(lambda: train("killed", die)) for die in (*deaths, lambda: None)]))
"""


@pytest.mark.slow
def test_the_command_killed_in_the_middle_of_writes(tmp_path, run_script, assert_same_run):
    """`atas train --resume`, killed in two writes of checkpoints, then between two, then left to end."""
    values = ["training.epochs=3", "training.checkpoint_every=0", "training.probe=20", "method.warmup_epochs=1"]
    settings = [part for value in (*values, "training.batch_size=128") for part in ("--set", value)]
    assert run_script(COMMAND, arguments=["digits-small-cnn-atas", *settings]) == [-signal.SIGKILL] * 3 + [0]
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
