"""The small runs, results and data sets that the cases start from, and what is read off them."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from torture.harness import Answer, Process, atas, call

RECIPE = "digits-small-cnn-atas"
SETTINGS = {
    "training.epochs": 2,
    "training.probe": 20,
    "training.batch_size": 512,
    "training.checkpoint_every": 0,
    "training.loggers": "[]",
    "method.warmup_epochs": 1,
    "evaluation.attacks": "fgsm",
    "evaluation.examples": 20,
}
ATTACKS = ("--attacks", "fgsm,pgd5", "--examples", "24")
TIMES = {"seconds", "examples_per_second", "checks_seconds", "date", "environment", "sentence", "checksum"}


def train(folder: Path, *more: object) -> Callable[[], object]:
    """Return the training of a small run into a folder."""
    values = [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]
    return atas("train", RECIPE, *values, "--out", folder, *more)


def checked(work: Callable[[], object]) -> Answer:
    """Run work that must succeed."""
    answer = call(work)
    if answer.status != 0:
        raise RuntimeError(f"the suite cannot prepare its files: {answer.err}")
    return answer


class Corpus:
    """A finished and evaluated run, a stopped run, photos, a packed set and arrays, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run, self.stopped = folder / "run", folder / "stopped"
        self.photos, self.packed, self.arrays = folder / "photos", folder / "packed", folder / "arrays"
        checked(train(self.run))
        checked(atas("evaluate", self.run, *ATTACKS))
        checked(atas("export", self.run, "--to", "safetensors"))
        self._stop()
        generator = np.random.default_rng(0)
        for number in range(48):
            path = self.photos / ("train", "test")[number % 2] / "ab"[number // 2 % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(generator.integers(0, 256, (30 + number % 5, 32, 3), dtype=np.uint8)).save(path)
        checked(pack(self))
        self._save_arrays(generator)

    def _save_arrays(self, generator: np.random.Generator) -> None:
        """Write a data set as an .npz file, whose members have checksums."""
        images, labels = generator.integers(0, 256, (12, 8, 8, 3), dtype=np.uint8), np.arange(12) % 3
        self.arrays.mkdir()
        np.savez(self.arrays / "cells.npz", x_train=images, y_train=labels, x_test=images[:6], y_test=labels[:6])

    def _stop(self) -> None:
        """Kill a training after its first epoch."""
        metrics = self.stopped / "metrics.jsonl"
        process = Process(train(self.stopped))
        while not metrics.exists() or not metrics.stat().st_size:
            time.sleep(0.001)
        process.wait(kill_after=0)

    def copy(self, name: str, folder: Path) -> Path:
        """Copy one of the folders."""
        return Path(shutil.copytree(self.folder / name, folder))


def pack(corpus: Corpus, target: Path | None = None) -> Callable[[], object]:
    """Return the packing of the photos."""
    return atas("data", "pack", corpus.photos, target or corpus.packed, "--size", 24)


def without_times(value: Any) -> Any:
    """Return JSON without what differs from run to run."""
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in TIMES}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def rows(path: Path) -> list[Any]:
    """Return the lines of a file of JSON without times."""
    return [without_times(json.loads(line)) for line in path.read_text().splitlines()]


def digest(path: Path) -> str:
    """Return a hash of a file, or of all files in a folder with their names; hidden ones do not count."""
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    files = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    return hashlib.sha256("".join(f"{file.relative_to(path)}{digest(file)}" for file in files).encode()).hexdigest()[
        :16
    ]


def training_result(folder: Path) -> Any:
    """Return what a training must give, whatever happened on the way."""
    return digest(folder / "model.safetensors"), rows(folder / "metrics.jsonl")


def evaluation_result(folder: Path) -> Any:
    """Return the figures and verdicts of an evaluation."""
    return without_times(json.loads((folder / "evaluation.json").read_text()))
