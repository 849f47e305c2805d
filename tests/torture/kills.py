"""SIGKILL at random moments and in the middle of writes: the same command then ends as if nothing had happened."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torture.corpus import (
    ATTACKS,
    RECIPE,
    SETTINGS,
    Corpus,
    digest,
    evaluation_result,
    pack,
    train,
    training_result,
    without_times,
)
from torture.harness import CHANGED, LOST, SAME, TIMEOUT, Answer, Case, Process, atas, call, die_in_write

KILLS_IN_A_ROW = 4
SHARES = {"train": 0.35, "evaluate": 0.2, "pack": 0.15, "export": 0.1, "reproduce": 0.1, "ranks": 0.1}


@dataclass(frozen=True)
class Job:
    """Work that resumes: how it starts in a fresh folder, what it does, and its result."""

    prepare: Callable[[Path], object]
    work: Callable[[Path], Callable[[], object]]
    result: Callable[[Path], Any]
    syncs: int  # about as many writes


def jobs(corpus: Corpus) -> dict[str, Job]:
    """Return the jobs by name."""

    def fresh_run(folder: Path) -> None:
        corpus.copy("run", folder)
        for name in ("evaluation.json", "evaluation.md"):
            (folder / name).unlink()
        shutil.rmtree(folder / "export")

    return {
        "train": Job(lambda folder: None, lambda folder: train(folder, "--resume"), training_result, 20),
        "evaluate": Job(fresh_run, lambda folder: atas("evaluate", folder, *ATTACKS), evaluation_result, 6),
        "pack": Job(lambda folder: None, lambda folder: pack(corpus, folder), digest, 12),
        "export": Job(
            fresh_run,
            lambda folder: atas("export", folder, "--to", "safetensors"),
            lambda folder: digest(folder / "export" / "safetensors" / "model.safetensors"),
            4,
        ),
        "reproduce": Job(lambda folder: None, lambda folder: lambda: plan(folder), plan_result, 40),
    }


def plan(folder: Path) -> None:
    """Run two small trials as a plan."""
    from rich.console import Console

    from atas.sweeps import Plan, PlanProgress, Store, Trial

    values = {key: value for key, value in SETTINGS.items() if not key.startswith("evaluation.")}
    values |= {"training.epochs": 1, "training.loggers": ()}
    trials = [Trial(RECIPE, values, seed=seed, attacks=("fgsm",), examples=20) for seed in (0, 1)]
    progress = PlanProgress(Console(quiet=True))
    failures = Plan(trials, Store(folder)).run(progress)
    if failures:
        raise SystemExit(failures[0].sentence)


def plan_result(folder: Path) -> Any:
    """Return the records of a plan without times."""
    return [without_times(json.loads(file.read_text())) for file in sorted((folder / "runs").glob("*.json"))]


def run(corpus: Corpus, folder: Path, count: int, seed: int) -> Iterator[Case]:
    """Kill `count` processes in all."""
    chance = random.Random(seed)
    by_name = jobs(corpus)
    for name, job in by_name.items():
        yield from _kill_job(name, job, folder / name, round(count * SHARES[name]), chance)
    yield from _kill_ranks(folder / "ranks", round(count * SHARES["ranks"]), chance)


def _kill_job(name: str, job: Job, folder: Path, count: int, chance: random.Random) -> Iterator[Case]:
    folder.mkdir(parents=True)
    whole = folder / "whole"
    job.prepare(whole)
    answer = call(job.work(whole))
    expected, left, attempt = job.result(whole), count, 0
    while left > 0:
        attempt += 1
        where = folder / f"killed{attempt}"
        job.prepare(where)
        work, case = job.work(where), f"{name} {attempt}"
        kills, fault = _kill(work, min(left, KILLS_IN_A_ROW), job.syncs, answer.seconds, chance)
        if fault is not None:
            yield Case("kills", case, fault.fault or "", fault.last_line)
        yield from _ended(case, call(work), partial(job.result, where), expected, kills)
        left -= max(kills, 1)
        shutil.rmtree(where, ignore_errors=True)


def _kill(
    work: Callable[[], object], count: int, syncs: int, seconds: float, chance: random.Random
) -> tuple[int, Answer | None]:
    """Kill work up to `count` times. Return the number of kills, and the answer of an attempt that failed."""
    for kills in range(count):
        if chance.random() < 0.5:
            answer = call(partial(_killed_in_write, work, chance.randint(1, syncs)))
        else:
            answer = call(work, kill_after=chance.uniform(0.05, 1.0) * seconds)
        if not answer.killed:
            return kills, answer if answer.fault else None
    return count, None


def _killed_in_write(work: Callable[[], object], sync: int) -> None:
    die_in_write(sync)
    work()


def _ended(name: str, answer: Answer, result: Callable[[], Any], expected: Any, kills: int) -> Iterator[Case]:
    """Yield a case for each kill, with the outcome of the last attempt."""
    outcome, detail = SAME, ""
    if answer.fault or answer.status:
        outcome, detail = answer.fault or LOST, answer.last_line
    else:
        try:
            outcome = SAME if result() == expected else CHANGED
        except OSError as error:
            outcome, detail = LOST, str(error)
    for number in range(max(kills, 1)):
        yield Case("kills", f"{name}, kill {number + 1}", outcome, detail)


def _kill_ranks(folder: Path, count: int, chance: random.Random) -> Iterator[Case]:
    """Kill one of two processes that train together; the other must end with a sentence, and the run resume.

    They have met by then: before, the other waits for up to ten minutes.
    """
    folder.mkdir(parents=True)
    shards = ("--set", "data.shards=2", "--set", "training.batch_size=256")
    whole = _ranks(folder / "whole", shards)
    expected = training_result(folder / "whole")
    for number in range(count):
        where = folder / f"killed{number}"
        killed = _ranks(where, shards, kill=(chance.randrange(2), chance.uniform(0, 0.8) * whole[0].seconds))
        faults = [answer for answer in killed if not answer.killed and answer.fault]
        if faults:
            yield Case("kills", f"ranks {number}", faults[0].fault or "", faults[0].last_line)
        resumed = _ranks(where, shards)
        worst = max(resumed, key=lambda answer: abs(answer.status or 0))
        yield from _ended(f"ranks {number}", worst, partial(training_result, where), expected, 1)
        shutil.rmtree(where, ignore_errors=True)


def _ranks(folder: Path, more: tuple[str, ...], kill: tuple[int, float] | None = None) -> list[Answer]:
    """Train on two ranks that meet at a store of this process."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def rank(number: int) -> None:
        os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "GLOO_SOCKET_IFNAME": "lo"}
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        train(folder, *more, "--resume")()

    processes = [Process(partial(rank, number)) for number in range(2)]
    if kill is not None:
        began = time.monotonic()
        while not folder.exists() and time.monotonic() - began < TIMEOUT:  # rank 0 creates it once they have met
            time.sleep(0.001)
        time.sleep(kill[1])
        with contextlib.suppress(ProcessLookupError):
            os.kill(processes[kill[0]].pid, signal.SIGKILL)
    return [process.wait() for process in processes]
