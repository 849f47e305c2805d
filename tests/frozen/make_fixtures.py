"""Write the files that `test_old_files.py` reads: python tests/frozen/make_fixtures.py

They stand for files that users have from earlier versions, so do not write them again because a test fails: let the
code read them. Only names that users rely on are used here.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import atas
from atas.cli import main as atas_command

FIXTURES = Path(__file__).parent / "fixtures"
# The smallest trainings that have every kind of state: memory, step sizes, averages, momentum, sums of half an epoch.
STOPPED = {
    "atas": {
        "method.warmup_epochs": 1,
        "method.reset_every": 2,
        "method.max_step": 0.2,
        "data.pad": 1,
        "data.flip": True,
    },
    "free": {"method.replays": 2},
}
VALUES = {"training.epochs": 3, "training.batch_size": 16, "training.probe": 20, "training.loggers": ()}
VALUES |= {"engine.device": "cpu", "method.eps": 0.1, "schedule.peak": 0.05}
THREAT = atas.Linf(0.1)
ATTACKS = ("fgsm", "pgd10x2", "apgd-t")
PLAN = ("table-cifar10", "--quick", "--methods", "atas,fgsm-rs", "--attacks", "fgsm,pgd2", "--examples", "20")
PLAN += ("--set", "training.epochs=1", "--set", "training.loggers=[]")


class Net(nn.Module):
    """A small smooth network in float64: on another machine, sums in another order change its sixteenth digit."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1, self.bn1 = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.fc = nn.Conv2d(4, 6, 3, stride=2), nn.Linear(6, 10)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.softplus(self.bn1(self.conv1(x.double())))
        return self.fc(F.softplus(self.conv2(x)).mean((2, 3)))


def digits() -> atas.data.Dataset:
    """Some of the digits, given in Python, as the network is."""
    whole = atas.data.load("digits")
    return atas.data.Dataset("some", whole.train.part(slice(60)), whole.test.part(slice(30)))


def sample() -> atas.data.Split:
    """What the finished run is evaluated on."""
    return atas.data.load("digits").test.part(slice(16))


class StopAfterFirstEpoch:
    """A logger that presses Ctrl-C: the training ends after the next batch, in the middle of the second epoch."""

    def start(self, epoch: int) -> None:
        pass

    def log(self, epoch: int, scalars: object, histograms: object) -> None:
        if epoch == 0:
            signal.raise_signal(signal.SIGINT)

    def close(self) -> None:
        pass


class StopError(Exception):
    """Ends an evaluation from within."""


class StopInAPGD:
    """For `progress`: ends an evaluation in the middle of its last attack."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self, status: object) -> None:
        self.looks += getattr(status, "doing", "") == "apgd-t"
        if self.looks == 3:
            raise StopError


def write_stopped_trainings() -> None:
    """Each twice: once stopped, once to the end, whose weights are what the stopped one has to come to."""
    for method, values in STOPPED.items():
        options = {"values": {**VALUES, "training.ema": 0.9, **values}, "data": digits()}
        recipe, out = f"digits-small-cnn-{method}", f"stopped-{method}"
        try:
            atas.train(recipe, out=out, model=Net(), loggers=[StopAfterFirstEpoch()], **options)
        except atas.AtasError as stop:
            print(stop)
        run = atas.train(recipe, out="whole", model=Net(), **options)
        save_file(run.model.state_dict(), f"stopped-{method}.safetensors")
        shutil.rmtree("whole")


def write_finished_run() -> dict[str, object]:
    """A run, its evaluation, the progress of another one that was stopped, and an export."""
    values = VALUES | {"training.epochs": 2, "training.batch_size": 64, "schedule.peak": 0.1, "method.max_step": 0.2}
    run = atas.train("digits-small-cnn-atas", out="finished", values=values)
    result = atas.evaluate(run.model, sample(), threat=THREAT, attacks=ATTACKS)
    result.save("finished/evaluation.json")
    try:
        atas.evaluate(
            run.model,
            sample(),
            threat=THREAT,
            attacks=ATTACKS,
            progress=StopInAPGD(),
            progress_file="finished/evaluation.progress.json",
        )
    except StopError:
        print("stopped the evaluation")
    atas.export.write("finished", "safetensors", "export")
    with torch.no_grad():
        logits = run.model(sample().images[:8].float() / 255)
    return {
        "version": atas.__version__,
        "logits": logits.tolist(),
        "metrics": run.metrics,
        "accuracy": result.accuracy,
        "correct": {name: verdicts.tolist() for name, verdicts in result.correct.items()},
        "queries": result.queries,
    }


def write_packed_set() -> dict[str, object]:
    """Photos of noise, packed in both formats."""
    rng = np.random.default_rng(0)
    for number in range(12):
        path = Path("photos", ("train", "test")[number % 2], "ab"[number // 2 % 2], f"{number}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (18 + number, 20, 3), dtype=np.uint8)).save(path)
        os.utime(path, (0, 0))
    expected = {}
    for form in ("raw", "jpeg"):
        atas.data.pack("photos", f"packed-{form}", size=16, format=form)
        data = atas.data.load("packed", f"packed-{form}")
        expected[form] = {
            split: [getattr(data, split).images[:].tolist(), getattr(data, split).labels.tolist()]
            for split in ("train", "test")
        }
    shutil.rmtree("photos")
    return expected


def write_records() -> None:
    """The records of a small plan; the weights that they are of are not needed to show them."""
    sys.argv = ["atas", "reproduce", *PLAN, "--out", "plan"]
    with contextlib.suppress(SystemExit):
        atas_command()
    for name in ("trainings", "evaluations"):
        shutil.rmtree(Path("plan", name))
    Path("plan", ".claims").unlink()


def main() -> None:
    torch.set_num_threads(1)
    os.environ["ATAS_COMMIT"] = "fixtures"
    shutil.rmtree(FIXTURES, ignore_errors=True)
    FIXTURES.mkdir()
    os.chdir(FIXTURES)
    sys.argv = ["make_fixtures.py"]
    write_stopped_trainings()
    expected = {"finished": write_finished_run(), "packed": write_packed_set()}
    Path("expected.json").write_text(json.dumps(expected) + "\n")
    write_records()
    for lock in FIXTURES.rglob(".lock"):
        lock.unlink()
    print(sum(path.stat().st_size for path in FIXTURES.rglob("*") if path.is_file()), "bytes")


if __name__ == "__main__":
    main()
