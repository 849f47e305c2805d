"""SIGKILL at random moments, in the middle of writes too: the run goes on and ends with the same bits.

The trainings are forked from one process that has everything imported, so that a kill costs milliseconds.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

NURSERY = '''
import json, os, random, shutil, signal, sys, time
import torch

torch.set_num_threads(1)
import torch.utils.tensorboard  # the import is slow; let it be done before the fork
from rich.console import Console
from torch import nn

import atas
from atas.training import Live, recipe
from atas.training.monitor import Monitor, Probe
from atas.training.trainer import Trainer

order = json.loads(sys.argv[1])
chance = random.Random(order["seed"])
generator = torch.Generator().manual_seed(0)
images = torch.rand(100, 1, 8, 8, generator=generator)
labels = torch.arange(100) % 3
data = atas.data.from_arrays("noise", images, labels, images[:10], labels[:10])
settings = recipe.load(order["recipe"])

if order["collapse_in"] is not None:
    trainers = []
    begin = Trainer.__init__

    def remember(self, *arguments):
        begin(self, *arguments)
        trainers[:] = [self]

    def scripted(self, model, ask):
        collapse = trainers[0].epoch == order["collapse_in"] and trainers[0].rollbacks == 0
        return Probe(0.9, 0.9, 0.0) if collapse else Probe(0.9, 0.6, 0.5)

    Trainer.__init__, Monitor.probe = remember, scripted


def train(out):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3))
    atas.train(settings, out=out, model=net, data=data, resume=True, live=Live(Console(file=open(os.devnull, "w"))))


def die_in_write(number):
    """Die just before the given sync of a file or folder; a file that is still under its temporary name is torn."""
    sync, left = os.fsync, [number]

    def deadly(descriptor):
        left[0] -= 1
        if not left[0]:
            link = f"/proc/self/fd/{descriptor}"
            if os.path.islink(link) and os.readlink(link).endswith(".tmp"):
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        sync(descriptor)

    os.fsync = deadly


def attempt(out, delay=None, sync=None):
    """Train in a process of its own, killed after `delay` seconds or in a write; the signal that ended it, or 0."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if sync is not None:
                die_in_write(sync)
            train(out)
            status = 0
        finally:
            os._exit(status)
    end = None if delay is None else time.monotonic() + delay
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            assert code in (0, -signal.SIGKILL), code
            return -code
        if end is not None and time.monotonic() >= end:
            os.kill(child, signal.SIGKILL)
            end = None
        time.sleep(0.0002)


started = time.monotonic()
assert attempt(order["whole"]) == 0
whole = time.monotonic() - started
kills, parts = 0, 3
while kills < order["least_kills"] and parts < 100:  # on a busy machine the first run may have been the slow one
    shutil.rmtree(order["killed"], ignore_errors=True)
    kills = 0
    while kills < order["most_kills"]:
        where = {"sync": chance.randint(1, 15)} if kills % 2 else {"delay": chance.uniform(0.3, 1) * whole / parts}
        if not attempt(order["killed"], **where):
            break
        kills += 1
    parts *= 2
assert attempt(order["killed"]) == 0
print(json.dumps({"kills": kills, "whole": whole}))
'''


def run_nursery(tmp_path, recipe, **order):
    (tmp_path / "nursery.py").write_text(NURSERY)
    (tmp_path / "toy.toml").write_text(recipe.to_toml())
    order = {
        "seed": random.SystemRandom().randrange(1000),
        "recipe": str(tmp_path / "toy.toml"),
        "whole": str(tmp_path / "whole"),
        "killed": str(tmp_path / "killed"),
        "collapse_in": None,
        "least_kills": 3,
        "most_kills": 12,
        **order,
    }
    done = subprocess.run(
        [sys.executable, str(tmp_path / "nursery.py"), json.dumps(order)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, (order, done.stderr)
    return json.loads(done.stdout)


@pytest.mark.parametrize("method", ["atas", "free"])
def test_killed_at_random_moments(method, tmp_path, toy_recipe, assert_same_run):
    """A checkpoint is written after every step; half of the kills come in the middle of a write."""
    values = {"training.checkpoint_every": 0.0, "training.epochs": 6, "training.ema": 0.9}
    found = run_nursery(tmp_path, toy_recipe(method, values))
    assert found["kills"] >= 3, found
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.parametrize("on_collapse", ["rollback", "stop"])
def test_killed_around_a_collapse(on_collapse, tmp_path, toy_recipe, assert_same_run, rows_of):
    values = {"training.checkpoint_every": 0.0, "training.epochs": 6, "training.on_collapse": on_collapse}
    found = run_nursery(tmp_path, toy_recipe("atas", values), collapse_in=3)
    assert found["kills"] >= 3, found
    assert [row["event"] for row in rows_of(tmp_path / "killed") if "event" in row] == ["collapse", on_collapse]
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_killed_with_rare_checkpoints(tmp_path, toy_recipe, assert_same_run):
    """Most of these kills come before the first checkpoint or long after the last."""
    values = {"training.checkpoint_every": 0.1, "training.epochs": 6}
    run_nursery(tmp_path, toy_recipe("fgsm-rs", values), most_kills=8)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.slow
def test_the_command_killed_in_the_middle_of_writes(tmp_path, assert_same_run):
    """`atas train --resume`, killed on the sight of a temporary file, then at random, then left to end."""
    values = ["training.epochs=3", "training.checkpoint_every=0", "training.probe=100", "method.warmup_epochs=1"]
    settings = [part for value in values for part in ("--set", value)]
    train = [sys.executable, "-m", "atas", "train", "digits-small-cnn-atas", *settings, "--out"]
    # One thread, as many as the runs that these are compared with; without TensorBoard, whose import takes seconds.
    (tmp_path / "without" / "tensorboard").mkdir(parents=True)
    (tmp_path / "without" / "tensorboard" / "__init__.py").write_text("raise ImportError\n")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path / "without")}
    quiet = {"env": environment, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    subprocess.run([*train, str(tmp_path / "whole")], check=True, timeout=120, **quiet)

    killed = tmp_path / "killed"
    last = killed / "checkpoints" / "last.safetensors"
    for on_write in (True, False, True):
        process = subprocess.Popen([*train, str(killed), "--resume"], **quiet)
        stamp = last.stat().st_mtime_ns if last.exists() else 0
        while not last.exists() or last.stat().st_mtime_ns == stamp:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.001)
        if on_write:
            while not list(last.parent.glob("*.tmp")) + list(last.parent.glob(".*.tmp")) and process.poll() is None:
                pass
        else:
            time.sleep(random.SystemRandom().uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
    done = subprocess.run([*train, str(killed), "--resume"], timeout=120, **quiet)
    assert done.returncode == 0, done.stderr
    assert_same_run(tmp_path / "whole", killed)
