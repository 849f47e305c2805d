"""Damage every kind of file that the program reads: refused in one sentence, or nothing that it tells changes."""

from __future__ import annotations

import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torture.corpus import ATTACKS, Corpus, digest, evaluation_result, train, training_result, without_times
from torture.harness import CHANGED, LOST, SAME, SENTENCE, Answer, Case, atas, call

JUNK = (b"\xff\xfe", b"\x00", b"NaN", b"1e999", b"-1", b"null", b'"', b"}", b"\x1b[31m", b"[" * 3000, b"\n", b"{}")
WRONG: tuple[Any, ...] = (None, True, -1, 0, 1e308, 10**30, "x", "", [], {}, [[]], [1, "a"], {"a": {"b": None}})


@dataclass(frozen=True)
class Target:
    """A file, the folder that it belongs to, and a reader of that folder: a command and what it tells."""

    folder: str
    file: str
    work: Callable[[Path], Callable[[], object]]
    result: Callable[[Path, Answer], Any]
    weight: int = 1


def figures(folder: Path, answer: Answer) -> Any:
    """Return what `compare --json` says of a run, without times and paths."""
    return without_times(json.loads(answer.out.replace(json.dumps(str(folder))[1:-1], "")))


def targets() -> list[Target]:
    """Return the files that are damaged."""

    def compare(folder: Path) -> Callable[[], object]:
        return atas("compare", folder, "--json")

    def evaluate(folder: Path) -> Callable[[], object]:
        return atas("evaluate", folder, *ATTACKS, "--out", folder / "new" / "evaluation.json")

    def export(folder: Path) -> Callable[[], object]:
        return atas("export", folder, "--to", "safetensors", "--out", folder / "new")

    def load(folder: Path) -> Callable[[], object]:
        def work() -> None:
            import atas as library

            try:
                print(library.load(folder / "export" / "safetensors" / "model.safetensors")(_images()).sum().item())
            except library.AtasError as error:
                print(error, file=sys.stderr)
                raise SystemExit(1) from None

        return work

    def read_rows(folder: Path) -> Callable[[], object]:
        def work() -> None:
            from atas import AtasError, report

            try:
                (run,) = report.summarise([folder])
                print(json.dumps(run.epochs))
            except AtasError as error:
                print(error, file=sys.stderr)
                raise SystemExit(1) from None

        return work

    def verify(folder: Path) -> Callable[[], object]:
        return atas("data", "verify", folder)

    def read(folder: Path) -> Callable[[], object]:
        return atas("data", "check", "packed", "--root", folder, "--json")

    def read_arrays(folder: Path) -> Callable[[], object]:
        return atas("data", "check", folder / "cells.npz", "--json")

    def content(_: Path, answer: Answer) -> Any:
        return {key: value for key, value in json.loads(answer.out).items() if key != "data"}

    def said(_: Path, answer: Answer) -> str:
        return answer.out.split(": ", 1)[-1]

    verdicts = lambda folder, _: evaluation_result(folder / "new")  # noqa: E731
    return [
        Target("run", "metrics.jsonl", compare, figures, 3),
        Target("run", "metrics.jsonl", read_rows, lambda _, answer: json.loads(answer.out), 3),
        Target("run", "evaluation.json", compare, figures, 3),
        Target("run", "recipe.toml", compare, figures),
        Target("run", "environment.json", compare, figures),
        Target("run", "recipe.toml", evaluate, verdicts, 2),
        Target("run", "model.safetensors", evaluate, verdicts, 3),
        Target("run", "evaluation.json", export, lambda folder, _: digest(folder / "new" / "model.safetensors")),
        Target("run", "metrics.jsonl", export, lambda folder, _: digest(folder / "new" / "model.safetensors")),
        Target("run", "export/safetensors/model.safetensors", load, said, 2),
        Target(
            "stopped",
            "checkpoints/last.safetensors",
            lambda folder: train(folder, "--resume"),
            lambda folder, _: training_result(folder),
            3,
        ),
        Target(
            "stopped", "recipe.toml", lambda folder: atas("train", "--resume", "--out", folder),
            lambda folder, _: training_result(folder), 2,
        ),
        Target(
            "stopped", "metrics.jsonl", lambda folder: train(folder, "--resume"),
            lambda folder, _: training_result(folder), 2,
        ),
        Target("packed", "manifest.json", verify, said, 2),
        Target("packed", "*.raw", verify, said),
        Target("packed", "t*-*.json", verify, said),
        Target("packed", "manifest.json", read, lambda _, answer: json.loads(answer.out)),
        Target("arrays", "cells.npz", read_arrays, content, 2),
    ]  # fmt: skip


def _images() -> Any:
    import torch

    return torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def run(corpus: Corpus, folder: Path, count: int, seed: int) -> Iterator[Case]:
    """Damage `count` files."""
    folder.mkdir(parents=True)
    known = [target for target in targets() if list((corpus.folder / target.folder).glob(target.file))]
    expected: dict[int, Any] = {}
    for number, target in enumerate(known):
        where = corpus.copy(target.folder, folder / f"whole{number}" / target.folder)
        answer = call(target.work(where))
        if answer.status != 0:
            raise RuntimeError(f"the intact {target.file} cannot be read: {answer.err}")
        expected[number] = target.result(where, answer)
        shutil.rmtree(where)
    chance = random.Random(seed)
    numbers = [number for number, target in enumerate(known) for _ in range(target.weight)]
    for case in range(count):
        number = numbers[case % len(numbers)]
        target, name = known[number], f"{known[number].file} {case}"
        where = corpus.copy(target.folder, folder / f"case{case}" / target.folder)
        file = chance.choice(sorted(where.glob(target.file)))
        before = file.read_bytes()
        how = _damage(file, chance)
        if file.read_bytes() != before:
            yield _judge(target, name, where, expected[number], how)
        shutil.rmtree(where)


def _judge(target: Target, name: str, where: Path, expected: Any, how: str) -> Case:
    answer = call(target.work(where))
    if answer.fault:
        return Case("mutations", name, answer.fault, f"{how}: {answer.last_line}")
    if answer.status:
        return Case("mutations", name, SENTENCE, f"{how}: {answer.last_line}")
    try:
        found = target.result(where, answer)
    except (OSError, ValueError) as error:
        return Case("mutations", name, LOST, f"{how}: {error}")
    return Case("mutations", name, SAME if found == expected else CHANGED, how)


def _damage(file: Path, chance: random.Random) -> str:
    """Damage a file in place; return how."""
    if file.suffix in (".json", ".jsonl") and chance.random() < 0.5:
        return _wrong_type(file, chance)
    content = bytearray(file.read_bytes())
    at = chance.randrange(len(content))
    if chance.random() < 0.4:
        at = chance.randrange(min(len(content), 400))  # headers are at the start
    end = min(len(content), at + chance.choice((1, 8, 100)))
    how = chance.choice(("flip", "byte", "delete", "insert", "truncate", "repeat", "empty"))
    match how:
        case "flip":
            content[at] ^= 1 << chance.randrange(8)
        case "byte":
            content[at] = chance.randrange(256)
        case "delete":
            del content[at:end]
        case "insert":
            content[at:at] = chance.choice(JUNK)
        case "truncate":
            del content[at:]
        case "repeat":
            content[at:at] = content[at:end]
        case "empty":
            content.clear()
    file.write_bytes(bytes(content))
    return f"{how} at {at}"


def _wrong_type(file: Path, chance: random.Random) -> str:
    """Replace or remove one value of a JSON file, or of one line of it."""
    lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
    row = chance.randrange(len(lines))
    document = json.loads(lines[row])
    places = list(_places(document))
    parent, key = chance.choice(places)
    how = "removed"
    if chance.random() < 0.25 and isinstance(parent, dict):
        del parent[key]
    else:
        value = chance.choice(WRONG)
        parent[key], how = value, f"{value!r}"
    lines[row] = json.dumps(document)
    file.write_text("\n".join(lines) + "\n")
    return f"{key} {how}"


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    pairs = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in list(pairs):
        yield document, key
        if isinstance(value, dict | list):
            yield from _places(value)
