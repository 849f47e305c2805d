"""Two of everything at once in one folder: both end with the same result, or one is refused in a sentence."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torture.corpus import ATTACKS, Corpus, digest, evaluation_result, pack, train, training_result
from torture.harness import CHANGED, LOST, SAME, SENTENCE, Case, Process, atas, call


def run(corpus: Corpus, folder: Path, count: int, seed: int) -> Iterator[Case]:
    """Start `count` pairs."""
    folder.mkdir(parents=True)
    chance = random.Random(seed)

    def run_folder(where: Path) -> object:
        return corpus.copy("run", where)

    def exported(where: Path) -> str:
        return digest(where / "export" / "safetensors" / "model.safetensors")

    nothing: Callable[[Path], object] = lambda where: None  # noqa: E731
    jobs: dict[str, tuple[Callable[[Path], object], Callable[[Path], Callable[[], object]], Callable[[Path], Any]]] = {
        "train": (nothing, train, training_result),
        "resume": (nothing, lambda where: train(where, "--resume"), training_result),
        "overwrite": (run_folder, lambda where: train(where, "--overwrite"), training_result),
        "evaluate": (run_folder, lambda where: atas("evaluate", where, *ATTACKS), evaluation_result),
        "export": (run_folder, lambda where: atas("export", where, "--to", "safetensors"), exported),
        "pack": (nothing, lambda where: pack(corpus, where), digest),
        "report": (run_folder, lambda where: atas("report", where), lambda where: (where / "report.html").exists()),
    }
    expected = {}
    for name, (prepare, work, result) in jobs.items():
        prepare(folder / name)
        call(work(folder / name))
        expected[name] = result(folder / name)
    for number in range(count):
        name = list(jobs)[number % len(jobs)]
        prepare, work, result = jobs[name]
        where = folder / f"case{number}"
        prepare(where)
        first = Process(work(where))
        time.sleep(chance.choice((0, 0, 0.05, 0.3)))
        second = Process(work(where))
        answers = [process.wait() for process in (first, second)]
        yield _judge(f"{name} {number}", answers, where, result, expected[name])
        shutil.rmtree(where, ignore_errors=True)


def _judge(name: str, answers: list[Any], where: Path, result: Callable[[Path], Any], expected: Any) -> Case:
    faults = [answer for answer in answers if answer.fault]
    if faults:
        return Case("pairs", name, faults[0].fault, faults[0].last_line)
    refused = [answer for answer in answers if answer.status]
    if len(refused) == 2:
        return Case("pairs", name, LOST, f"both refused: {refused[0].last_line}")
    try:
        if result(where) != expected:
            return Case("pairs", name, CHANGED)
    except (OSError, ValueError) as error:
        return Case("pairs", name, LOST, str(error))
    return Case("pairs", name, SENTENCE if refused else SAME, refused[0].last_line if refused else "")
