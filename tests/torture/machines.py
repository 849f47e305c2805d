"""Scarce machines: files that cannot grow, few open files, little memory, and folders that cannot be written."""

from __future__ import annotations

import os
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torture.corpus import ATTACKS, Corpus, digest, pack, train, training_result
from torture.harness import CHANGED, LOST, SAME, SENTENCE, Case, atas, call


def run(corpus: Corpus, folder: Path, count: int, seed: int) -> Iterator[Case]:
    """Run every kind of work under every limit, `count` cases in all; then again without, which must end well."""
    folder.mkdir(parents=True)
    chance = random.Random(seed)
    train_whole = folder / "train"
    call(train(train_whole))
    expected = training_result(train_whole)
    jobs: dict[str, tuple[Callable[[Path], object], Callable[[Path], Callable[[], object]]]] = {
        "train": (lambda where: None, lambda where: train(where, "--resume")),
        "evaluate": (lambda where: corpus.copy("run", where), lambda where: atas("evaluate", where, *ATTACKS)),
        "export": (
            lambda where: corpus.copy("run", where),
            lambda where: atas("export", where, "--to", "safetensors"),
        ),
        "report": (lambda where: corpus.copy("run", where), lambda where: atas("report", where)),
        "pack": (lambda where: None, lambda where: pack(corpus, where)),
    }
    for number in range(count):
        name = list(jobs)[number % len(jobs)]
        prepare, work = jobs[name]
        where = folder / f"case{number}"
        prepare(where)
        files = chance.choice(({}, {}, _limit(chance)))
        limits = files or _limit(chance)
        yield _judge(name, where, work, limits, expected)
        shutil.rmtree(where, ignore_errors=True)


def _limit(chance: random.Random) -> dict[int, int]:
    kind = chance.choice(("size", "files", "memory"))
    if kind == "size":  # as a full disk: a write fails in the middle of a file; what is printed needs a few thousand
        return {resource.RLIMIT_FSIZE: chance.choice((4_000, 6_000, 10_000, 40_000, 100_000, 400_000))}
    if kind == "files":
        return {resource.RLIMIT_NOFILE: len(os.listdir("/proc/self/fd")) + chance.randint(0, 12)}
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    return {resource.RLIMIT_AS: used + chance.choice((0, 1_000_000, 10_000_000, 30_000_000, 60_000_000))}


def _judge(name: str, where: Path, work: Any, limits: dict[int, int], expected: Any) -> Case:
    before = digest(where / "model.safetensors") if (where / "model.safetensors").exists() else None
    answer = call(work(where), limits=limits)
    label = f"{name}, {limits}"
    if answer.fault:
        return Case("machines", label, answer.fault, answer.last_line)
    again = call(work(where))
    if again.fault or again.status:
        return Case("machines", label, again.fault or LOST, f"afterwards: {again.last_line}")
    if name == "train" and training_result(where) != expected:
        return Case("machines", label, CHANGED)
    if before is not None and digest(where / "model.safetensors") != before:
        return Case("machines", label, LOST, "the weights have changed")
    return Case("machines", label, SENTENCE if answer.status else SAME, answer.last_line if answer.status else "")
