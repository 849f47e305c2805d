"""Wrong recipe values: each is refused in one sentence before anything is written, or the run ends well."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from torture.corpus import Corpus, train
from torture.harness import LOST, SAME, SENTENCE, Case, call

VALUES = (
    "-1", "0", "1", "2", "0.5", "1e-30", "1e30", "nan", "inf", "-inf", "none", "true", "", "x", "8/255", "1/0", "[]",
    "[0]", "[1,2]", "[[1]]", "{}", "auto", "99999999999999999999", "0.1,0.2", "linf", "l2", "cpu", "cuda", "gpu",
    "float16", "a\nb", "\x1b[31m", "../..", "json:loads", "[0.5, nan]", "3.0", "'1'",
)  # fmt: skip
KEEP = {"training.epochs": "1"}  # a training must stay short


def keys() -> list[str]:
    """Return all recipe keys, with the hyperparameters of several methods."""
    from atas import methods
    from atas.recipes.schema import section_types

    found = []
    for section, kind in section_types().items():
        found += [f"{section}.{name}" for name in kind.__dataclass_fields__ if name != "settings"]
    return found + [f"method.{name}" for name in methods.setting_types("atas")] + ["training.epoch", "nothing.x", "x"]


def run(corpus: Corpus, folder: Path, count: int, seed: int) -> Iterator[Case]:
    """Try `count` values."""
    del corpus
    folder.mkdir(parents=True)
    chance, known = random.Random(seed), keys()
    for number in range(count):
        key, value = known[number % len(known)], chance.choice(VALUES)
        if key == "training.epochs" and value not in ("-1", "0", "nan", "x", ""):
            value = "0.5"
        where = folder / f"case{number}"
        answer = call(train(where, "--set", f"{key}={value}"))
        yield _judge(f"{key}={value!r}", where, answer)
        shutil.rmtree(where, ignore_errors=True)


def _judge(name, where, answer):  # type: ignore[no-untyped-def]
    if answer.fault:
        return Case("values", name, answer.fault, answer.last_line)
    if answer.status:
        begun = [path.name for path in where.glob("*")] if where.exists() else []
        outcome = SENTENCE if not begun or "diverged" in answer.err else LOST
        return Case("values", name, outcome, f"{answer.last_line} {' '.join(begun)}")
    losses = [json.loads(row).get("loss") for row in (where / "metrics.jsonl").read_text().splitlines()]
    ended = (where / "model.safetensors").exists() and losses
    return Case("values", name, SAME if ended else LOST, str(losses))
