"""Wrong arguments to the public functions: an error of `atas` in one sentence, or a result."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torture.corpus import Corpus
from torture.harness import SAME, SENTENCE, Case, call


def wrong() -> dict[str, Any]:
    """Return wrong values by name."""
    import numpy as np
    import torch

    return {
        "None": None,
        "text": "x",
        "empty text": "",
        "-1": -1,
        "0": 0,
        "half": 0.5,
        "nan": float("nan"),
        "inf": float("inf"),
        "huge": 10**30,
        "list": [],
        "nested": [[1, "a"]],
        "tuple of three": (0.1, 0.2, 0.3),
        "dict": {},
        "object": object(),
        "function": len,
        "empty tensor": torch.empty(0),
        "nan tensor": torch.full((4, 1, 8, 8), float("nan")),
        "bytes tensor": torch.zeros(4, 1, 8, 8, dtype=torch.uint8),
        "flat tensor": torch.zeros(4),
        "float labels": torch.zeros(4, dtype=torch.float32),
        "far labels": torch.full((4,), 99),
        "negative labels": torch.full((4,), -3),
        "array of text": np.array(["a", "b"]),
        "meta tensor": torch.empty(4, 1, 8, 8, device="meta"),
    }


def calls() -> dict[str, tuple[Callable[..., object], dict[str, Any]]]:
    """Return valid calls of the public functions, by name, whose arguments are replaced one at a time."""
    import torch
    from torch import nn

    import atas

    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    x, y, index = torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 2, 0]), torch.arange(4)
    threat = atas.Linf(0.1)

    def begun(name: str) -> Any:
        method = atas.methods.create(name, threat, 4, (1, 8, 8))
        method.start_epoch(0, 3)
        return method

    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    made: dict[str, tuple[Callable[..., object], dict[str, Any]]] = {
        "Linf": (atas.Linf, {"eps": 0.1}),
        "L2": (atas.L2, {"eps": 0.1}),
        "random_view": (atas.random_view, {"x": x, "pad": 2}),
        "ATAS": (
            atas.ATAS,
            {"threat": threat, "examples": 4, "shape": (1, 8, 8), "c": 1.28, "max_step": 0.1, "beta": 0.5}
            | {"clip": (0.01, 0.1), "warmup_epochs": 1, "reset_every": 3, "pad": 2, "dtype": torch.int8, "seed": 0},
        ),
        "methods.create": (
            lambda **kw: atas.methods.create(kw["name"], kw["threat"], kw["examples"], kw["shape"]),
            {"name": "pgd", "threat": threat, "examples": 4, "shape": (1, 8, 8)},
        ),
        "models.create": (atas.models.create, {"name": "small-cnn", "num_classes": 3, "channels": 1}),
        "data.load": (atas.data.load, {"name": "digits"}),
        "data.from_arrays": (
            lambda **kw: atas.data.from_arrays(kw["name"], kw["images"], kw["labels"], kw["tests"], kw["answers"]),
            {"name": "mine", "images": x, "labels": y, "tests": x, "answers": y},
        ),
        "evaluate": (
            lambda **kw: atas.evaluate(
                kw["model"], kw["x"], kw["y"], kw["threat"], attacks=kw["attacks"], batch_size=kw["batch_size"]
            ),
            {"model": net, "x": x, "y": y, "threat": threat, "attacks": ("fgsm",), "batch_size": 4},
        ),
        "start_epoch": (begun("atas").start_epoch, {"epoch": 0, "epochs": 3}),
        "load": (atas.load, {"path": "/nowhere"}),
    }
    for name in ("fgsm", "pgd"):
        arguments = {"model": net, "x": x, "y": y, "threat": threat}
        made[f"attacks.{name}"] = (getattr(atas.attacks, name), arguments | ({"steps": 2} if name == "pgd" else {}))
    for name in ("atas", "trades", "yopo"):
        arguments = {"model": net, "optimizer": optimizer, "x": x, "y": y, "index": index}
        made[f"{name}.step"] = (begun(name).step, arguments)
    made["atas.perturb"] = (begun("atas").perturb, {"model": net, "x": x, "y": y, "index": index})
    return made


def run(corpus: Corpus, folder: Path, count: int, seed: int) -> Iterator[Case]:
    """Make `count` wrong calls, each in a process of its own."""
    del corpus, folder
    valid, values = calls(), wrong()
    for name, (function, arguments) in valid.items():
        answer = call(partial(function, **arguments))
        if answer.fault and name != "load":
            raise RuntimeError(f"the valid call of {name} fails: {answer.err}")
    every = [(name, key, value) for name, (_, arguments) in valid.items() for key in arguments for value in values]
    chance = random.Random(seed)
    for name, key, value in chance.sample(every, min(count, len(every))):
        function, arguments = valid[name]
        yield _judge(f"{name}({key}={value})", function, arguments | {key: values[value]})


def _judge(name: str, function: Callable[..., object], arguments: dict[str, Any]) -> Case:
    def work() -> None:
        import sys

        from atas.errors import AtasError

        try:
            function(**arguments)
        except AtasError as error:
            print(error, file=sys.stderr)
            raise SystemExit(2) from None

    answer = call(work)
    outcome = answer.fault or (SENTENCE if answer.status else SAME)
    return Case("misuse", name, outcome, answer.last_line if outcome != SAME else "")
