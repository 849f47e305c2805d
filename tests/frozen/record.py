"""Record what the library does, to the bit, so that two versions of its code can be compared on one machine.

    python tests/frozen/record.py OUT.json
    python tests/frozen/record.py --compare OLD.json NEW.json

A worktree records its own `src`. What differs from run to run (times, dates, places) is masked; everything else has to
agree. `--parts` records only some parts, `--skip` leaves out entries by the beginning of their names when comparing.
"""

# ruff: noqa: E402 (the environment comes before the imports)

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import inspect
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]

# Set before torch and atas are imported: bits depend on the number of threads, texts on the terminal and the locale.
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "COLUMNS": "200",
    "NO_COLOR": "1",
    "TERM": "dumb",
    "TZ": "UTC",
    "LANG": "C.UTF-8",
    "ATAS_COMMIT": "frozen",
    "SOURCE_DATE_EPOCH": "0",
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(Path(__file__).parent)]),
    "PYTHONHASHSEED": "0",
}
sys.path.insert(0, str(ROOT / "src"))

import torch
from safetensors import safe_open
from torch import Tensor, nn

# Names that users rely on: these stay where they are.
import atas

# All other names. When the code is restructured, only this block follows; the rest of the file stays as it is.
from atas import cli, recipes
from atas.core.augment import View
from atas.core.resized_crop import BoxView
from atas.core.rng import CounterRNG, Stream
from atas.distributed.sharding import DataShard
from atas.paper.studies import get as study
from atas.paper.studies import names as study_names
from atas.paper.study import StudyOptions
from atas.training import checkpoint
from atas.training.monitor import Monitor, ProbeResult, split_probe

Entries = dict[str, Any]
THREATS = {"linf": atas.Linf(8 / 255), "l2": atas.L2(0.5)}
RECIPE = "digits-small-cnn-atas"
QUICK = {"training.epochs": 2, "training.batch_size": 64, "training.probe": 40, "training.loggers": ()}
QUICK |= {"engine.device": "cpu", "method.eps": 0.1}


# What is written down


def digest(*things: Any) -> str:
    """A short hash of tensors, to the bit, and of anything else by its repr."""
    found = hashlib.sha256()
    for thing in things:
        if isinstance(thing, Tensor):
            found.update(f"{thing.dtype} {tuple(thing.shape)}".encode())
            found.update(thing.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(thing, dict):
            found.update(digest(*(part for key in sorted(thing) for part in (key, thing[key]))).encode())
        elif isinstance(thing, list | tuple):
            found.update(digest(len(thing), *thing).encode())
        else:
            found.update(thing if isinstance(thing, bytes) else repr(thing).encode())
    return found.hexdigest()[:16]


def layout(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Names, types and shapes: what a file written by another version has to fit."""
    return {name: f"{tensor.dtype} {tuple(tensor.shape)}" for name, tensor in sorted(tensors.items())}


_NUMBER = r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"
_MASKS = [
    (re.compile(r"\d{4}-\d\d-\d\d[T ][\d:.]+(?:Z|[+-]\d\d:\d\d)?"), "DATE"),
    (re.compile(r"\d{4}-\d\d-\d\d"), "DATE"),
    (re.compile(rf"{_NUMBER}(?: |&nbsp;)?(?:µs|ms|s|min|h|seconds|minutes|hours)\b"), "TIME"),
    (re.compile(rf"{_NUMBER} (?:examples|images|steps)/s"), "RATE"),
    (re.compile(r"\b\d+:\d\d(?::\d\d)?\b"), "CLOCK"),
    (re.compile(rf'"(seconds|examples_per_second)": {_NUMBER}'), r'"\1": TIME'),  # in JSON that is printed
    (re.compile(r'data-sort="[^"]*">TIME'), "TIME"),  # in reports
    (re.compile(r"0x[0-9a-f]{6,}"), "ADDRESS"),
]
_TIMES = {"seconds", "examples_per_second", "checks_seconds", "date", "metrics_bytes", "evaluation_seconds", "checksum"}


def masked(value: Any) -> Any:
    """The value without what no two runs have in common: times, dates and places."""
    if isinstance(value, dict):
        return {str(key): "TIME" if key in _TIMES else masked(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inner) for inner in value]
    if not isinstance(value, str):
        return value
    for place, name in ((str(Path.cwd()), "WORK"), (str(ROOT), "ROOT"), (socket.gethostname(), "HOST")):
        value = value.replace(place, name)
    for pattern, name in _MASKS:
        value = pattern.sub(name, value)
    return value


def words(text: str) -> list[str]:
    """Lines of output, masked; the width of a table depends on the times in it, so its rules and gaps do not count."""
    lines = (re.sub(r"[─━═\-]{2,}", "--", re.sub(r"[ \t]+", " ", line)).strip() for line in masked(text).splitlines())
    return [line for line in lines if line and line != "--"]


def text_of(path: Path) -> list[str]:
    return words(path.read_text(encoding="utf-8"))


def page_of(path: Path) -> list[str]:
    """The elements of an HTML page, so that a difference can be read; pictures and scripts as hashes."""
    lines = words(path.read_text(encoding="utf-8").replace("><", ">\n<"))
    return [line if len(line) < 300 else digest(line) for line in lines]


def files_in(folder: Path) -> list[str]:
    """Paths in a folder; TensorBoard names its files by time and process, and locks come and go."""
    names = (str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return sorted(re.sub(r"tfevents\..*", "tfevents", name) for name in names if ".claims" not in name)


def command(*arguments: Any) -> tuple[int, str, str]:
    """Run `atas` in this process: its exit status, and what it wrote to both streams."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    argv = mock.patch.object(sys, "argv", ["atas", *map(str, arguments)])
    with argv, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            cli.main()
        except SystemExit as end:
            status = end.code or 0
    return status, out.getvalue(), err.getvalue()


def said(*arguments: Any) -> list[Any]:
    status, out, err = command(*arguments)
    return [status, words(out), words(err)]


# What is attacked and trained


class Net(nn.Module):
    """A small network with BatchNorm."""

    def __init__(self, seed: int = 0, channels: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv1, self.bn1 = nn.Conv2d(channels, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv2, self.fc = nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        return self.fc(torch.relu(self.conv2(x)).mean((2, 3)))


class Guarded(nn.Module):
    """A network with four kinds of images, told by two pixels, so that each stage of AutoAttack breaks some of them.

    0: nothing is hidden from APGD on the cross-entropy. 1: logits are so large that the cross-entropy has no gradient.
    2: besides, the ratio in the DLR loss is dominated by classes that do not matter; FAB does not look at them.
    3: pixels are rounded, so there is no gradient at all, and only Square is left.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Conv2d(1, 6, 3, padding=1), nn.Softplus(), nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.Softplus()]
        self.net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 16, 10))

    def forward(self, x: Tensor) -> Tensor:
        kind = ((x[:, 0, 0, :2] > 0.5).long() @ torch.tensor([1, 2])).view(-1, 1)
        x = torch.where((kind == 3)[:, :, None, None], (x * 8).round() / 8, x)
        logits = 8 * self.net(x)
        aside = (200 * (x.mean((1, 2, 3)) - 0.5) + 12).exp().view(-1, 1)
        logits = torch.where((kind == 2) & (torch.arange(10) >= 2), logits - aside, logits)
        return torch.where((kind == 1) | (kind == 2), 1e5 * logits, logits)

    @classmethod
    def problem(cls) -> tuple[Guarded, Tensor, Tensor]:
        """The network, three images of each kind, and labels that it is right about."""
        x = torch.rand(16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        kind = torch.arange(16) % 4
        x[:, 0, 0, 0], x[:, 0, 0, 1] = kind % 2, kind // 2
        model = cls().eval()
        with torch.no_grad():
            model.net[-1].bias -= model.net(x).mean(0)
            return model, x[:12], model(x[:12]).argmax(1)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(24, 3, 8, 8, generator=generator)
    return images, torch.randint(10, (24,), generator=generator), torch.arange(24)


def sharp_problem() -> tuple[nn.Module, Tensor, Tensor]:
    """A network that is right about 24 images, some of them by little."""
    images, _, _ = batch()
    model = Net(1).eval()
    with torch.no_grad():
        model.fc.weight *= 30
        model.fc.bias -= model(images).mean(0)
        return model, images, model(images).argmax(1)


def digits(train: int = 300, test: int = 60) -> atas.data.Dataset:
    whole = atas.data.load("digits")
    return atas.data.Dataset("digits", whole.train.part(slice(train)), whole.test.part(slice(test)))


# The parts of the record


def record_api() -> Iterator[tuple[str, Any]]:
    """Names, parameters and defaults of everything that is public; annotations are not behaviour."""
    places = {"atas": atas}
    places |= {
        name: importlib.import_module(f"atas.{name}") for name in ("attacks", "data", "export", "methods", "models")
    }
    for place, module in places.items():
        yield f"api.{place}", sorted(module.__all__)
        for name in sorted(module.__all__):
            thing = getattr(module, name)
            if inspect.isclass(thing):
                yield f"api.{place}.{name}", {"": parameters(thing)} | members(thing)
            elif callable(thing):
                yield f"api.{place}.{name}", parameters(thing)
    for name in atas.methods.names():
        yield f"api.method.{name}", [repr(atas.methods.settings(name)), atas.methods.get(name).attack_mode]
    yield "api.names", [atas.methods.names(), atas.models.names(), atas.attacks.names(), atas.data.names()]
    yield "api.formats", list(atas.export.FORMATS)
    for name in ("fgsm", "pgd10", "pgd50x3", "autoattack", "autoattack-rand", "apgd-ce", "apgd-t", "fab-t", "square"):
        yield f"api.attack.{name}", {key: atas.attacks.create(name).settings(ball) for key, ball in THREATS.items()}
    heavy = "import atas, sys; dir(atas); print({'torch', 'numpy', 'rich', 'typer'} & set(sys.modules))"
    yield "api.import", subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True).stdout
    yield "api.exports", [atas.Linf(8 / 255), atas.L2(0.5), atas.__version__].__repr__()


def parameters(thing: Any) -> Any:
    try:
        found = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return None
    return [masked(f"{p.kind.name} {p.name}" + ("" if p.default is p.empty else f" = {p.default!r}")) for p in found]


def members(kind: type) -> dict[str, Any]:
    """The public members that come from the library's own classes."""
    own = [base for base in kind.__mro__ if base.__module__.partition(".")[0] == "atas"]
    names = {name for base in own for name in vars(base) if not name.startswith("_")}
    return {name: parameters(getattr(kind, name)) for name in sorted(names) if hasattr(kind, name)}


def record_cli() -> Iterator[tuple[str, Any]]:
    for name in (
        "",
        "ls",
        "data",
        "data get",
        "data check",
        "data pack",
        "data verify",
        "train",
        "evaluate",
        "compare",
    ):
        yield f"cli.help.{name}", said(*name.split(), "--help")
    for name in ("report", "export", "reproduce", "bench"):
        yield f"cli.help.{name}", said(name, "--help")
    for name in ("methods", "models", "data", "attacks", "recipes"):
        yield f"cli.ls.{name}", said("ls", name)
        yield f"cli.ls.{name}.json", json.loads(command("ls", name, "--json")[1])
    Path("broken.toml").write_text("[method\n")
    Path("unknown.toml").write_text('extends = "digits-small-cnn-atas"\n[training]\nepoch = 3\n')
    Path("empty").mkdir()
    for line in (
        "",
        "--version",
        "trian",
        "ls",
        "ls recipe",
        "train",
        "train nothing",
        "train digits-small-cnn-ata",
        "train broken.toml",
        "train unknown.toml",
        "train none.toml",
        "train digits-small-cnn-atas --set training.epoch=3",
        "train digits-small-cnn-atas --set epochs=3",
        "train digits-small-cnn-atas --set method.clip=wide",
        "train digits-small-cnn-atas --set training.epochs=0",
        "train digits-small-cnn-atas --set engine.device=tpu",
        "train digits-small-cnn-atas --set data.name=cifar11",
        "train digits-small-cnn-atas --set model.name=resnet19",
        "train digits-small-cnn-atas --set method.name=atla",
        "train digits-small-cnn-atas --set method.norm=l1",
        "train cifar10-preact-resnet18-atas --set engine.device=cpu",
        "train --resume --out empty",
        "evaluate",
        "evaluate nowhere",
        "evaluate empty",
        "evaluate empty --attacks pgd",
        "evaluate --weights none.safetensors --data digits --eps 0.1",
        "export empty --to keras",
        "export empty --to onnx",
        "report nowhere",
        "report empty",
        "compare nowhere",
        "compare empty --json",
        "data check digits",
        "data check digits --json",
        "data check cifar10",
        "data check imagefolder --root empty",
        "data get digits",
        "data verify empty",
        "data pack empty packed",
        "reproduce",
        "reproduce nothing",
        "reproduce --list",
        "reproduce --list --json",
        "reproduce theory --dry-run",
        "reproduce table-cifar10 --methods atla",
        "reproduce table-cifar10 --eps 3/255 --dry-run",
        "reproduce table-cifar10 --seeds 0,x --dry-run",
        "reproduce table-cifar10 schedules --quick --dry-run --out empty",
        "reproduce figure-steps --quick --dry-run --json --out empty",
        "bench nothing",
        "bench digits-small-cnn-atas --steps 0",
    ):
        yield f"cli.call.{line}", said(*line.split())
    yield (
        "cli.module",
        subprocess.run([sys.executable, "-m", "atas", "--version"], capture_output=True, text=True).stdout,
    )
    timed = command(
        "bench", RECIPE, "--steps", 1, "--json", "--set", "engine.device=cpu", "--set", "training.batch_size=16"
    )
    yield "cli.bench", sorted(json.loads(timed[1]))


def record_recipes() -> Iterator[tuple[str, Any]]:
    for name in recipes.names():
        found = recipes.load(name)
        yield f"recipe.{name}", [recipes.recipe_fingerprint(found), found.to_toml(), repr(found.threat)]
    changes = {"method.name": "atta", "method.step_size": "4/255", "method.grid": 4, "data.view": "resized"}
    yield "recipe.changed", recipes.load(RECIPE).with_values(changes).to_toml()


def record_studies() -> Iterator[tuple[str, Any]]:
    """Keys under which people have results, and the pages of the results that come with the repository."""
    sweeps = [name for name in study_names() if hasattr(study(name), "trials")]
    for name in sweeps:
        for quick in (True, False):
            trials = study(name).trials(StudyOptions(Path("x"), quick=quick))
            rows = [[trial.key, trial.training_key, trial.row, trial.label, trial.slug] for trial in trials]
            yield f"study.{name}.{'quick' if quick else 'full'}", rows
    shown = [name for name in sweeps if (ROOT / "results" / "cifar10" / f"{name}.md").exists()]
    options = ("--no-run", "--no-pictures", "--reuse", ROOT / "results" / "cifar10", "--out", "pages")
    status, out, err = command("reproduce", *shown, *options)
    yield "study.pages", [status, digest(words(out)), words(err)]
    for name in shown:
        yield f"study.page.{name}", digest(text_of(Path("pages", f"{name}.md")))
        yield f"study.page.{name}.json", digest(masked(json.loads(Path("pages", f"{name}.json").read_text())))


def record_numbers() -> Iterator[tuple[str, Any]]:
    """Random numbers, views, orders and the monitor's images: every run of the past depends on them."""
    index = torch.arange(7) * 12345
    for purpose in Stream:
        draws = [CounterRNG(seed, torch.tensor(epoch), index) for seed in (0, 1, 2**40 + 3) for epoch in (0, 29)]
        values = [number(purpose, (3, 5)) for draw in draws for number in (draw.uniform, draw.normal)]
        yield f"rng.{purpose.name}", [int(purpose), digest(values)]
    draw, images = (
        CounterRNG(5, torch.tensor(2), index),
        torch.rand(7, 3, 32, 32, generator=torch.Generator().manual_seed(1)),
    )
    view = View.draw(draw, 4)
    yield "rng.view", digest(view.top, view.left, view.flip, view.apply(images))
    boxes = {"crop": BoxView.crop(draw, 24, 32), "resized": BoxView.resized(draw, 24, (32, 32))}
    for name, box in boxes.items():
        yield f"rng.box.{name}", digest(box.top, box.left, box.height, box.width, box.flip, box.apply(images))
    generators = [torch.Generator().manual_seed(3) for _ in range(3)]
    found = [
        atas.random_view(images, pad=2, generator=generators[0]),
        atas.random_crop_view(images, 24, generator=generators[1]),
        atas.random_resized_view(images, 24, generator=generators[2]),
    ]
    yield "rng.random_views", digest([x for x, _ in found])
    for shards, processes in ((1, 1), (4, 2), (4, 3)):
        orders = [DataShard.for_rank(50, shards, rank, processes).order(3, 1) for rank in range(processes)]
        yield f"rng.order.{shards}.{processes}", [order.tolist() for order in orders]
    for examples, probe in ((60, 20), (50_000, 1000), (1297, 150)):
        probed, left = split_probe(examples, probe, held_out=True)
        yield f"rng.probe.{examples}", [probed[:20].tolist(), digest(probed, left)]


def record_models() -> Iterator[tuple[str, Any]]:
    x = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for name in atas.models.names():
        torch.manual_seed(0)
        model = atas.models.create(name, 10, 3)
        state = model.state_dict()
        yield f"model.{name}.layout", layout(state)
        logits = digest(model.eval()(x)) if "wrn" not in name else None  # a second per pass on one core
        yield f"model.{name}", [type(model).__name__, digest(state), logits]


# Settings beside the defaults; memory is written in several ways.
_MORE_METHODS = {
    "atas": {"float32": {"dtype": "float32"}, "float16": {"dtype": "float16"}, "grid": {"grid": 4}},
    "atta": {"host": {"store": "host"}, "grid-host": {"grid": 4, "store": "host"}},
    "pgd": {"short": {"steps": 2}},
}


def record_methods() -> Iterator[tuple[str, Any]]:
    """Steps of every method in both norms, through the warm-up and a reset: weights, state and losses."""
    for name in atas.methods.names():
        for norm, threat in THREATS.items():
            needed = {"weight": 0.2} if name == "fgsm-ga" and norm == "l2" else {}
            needed |= {"weight": 1000.0} if name == "elle" and norm == "l2" else {}
            needed |= {"logit_weight": 0.5} if name == "aaer" and norm == "l2" else {}
            needed |= {"classes": 10} if atas.methods.takes_classes(name) else {}
            variants = {"": {}} | (_MORE_METHODS.get(name, {}) if norm == "linf" else {})
            for variant, settings in variants.items():
                key = ".".join(filter(None, ("method", name, norm, variant)))
                yield key, steps_of(name, threat, **needed, **settings)


def steps_of(name: str, threat: atas.Threat, **settings: Any) -> dict[str, Any]:
    images, labels, index = batch()
    method = atas.methods.create(name, threat, 24, (3, 8, 8), pad=2, seed=3, **settings)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    steps = []
    for epoch in (0, 1, 5, 9):
        method.start_epoch(epoch, 30)
        for rows in index.split(10):
            view = View.draw(CounterRNG(3, torch.tensor(epoch), rows), 2)
            step = method.step(model, optimizer, view.apply(images, rows), labels[rows], rows, view)
            steps.append(step._asdict())
    state = method.state_dict()
    return {
        "weights": digest(model.state_dict()),
        "state": digest(state),
        "layout": layout(state),
        "steps": [sorted(steps[-1]), digest(steps)],
    }


def record_attacks() -> Iterator[tuple[str, Any]]:
    model, x, y = sharp_problem()
    for norm, threat in THREATS.items():
        yield f"attack.fgsm.{norm}", digest(atas.attacks.fgsm(model, x, y, threat))
        yield f"attack.pgd.{norm}", digest(atas.attacks.pgd(model, x, y, threat, 7, restarts=3, seed=2))
        # Budgets at which some examples hold, so that searches run to their ends.
        small = atas.Linf(1.5 / 255) if norm == "linf" else atas.L2(0.05)
        for name in ("pgd10x2", "apgd-ce", "apgd-dlr", "apgd-t", "fab-t"):
            found = atas.attacks.create(name)(model, x[:8], y[:8], small, seed=1)
            holds = int((model(found).argmax(1) == y[:8]).sum())
            yield f"attack.{name}.{norm}", [digest(found), holds]
        found = atas.attacks.create("square")(model, x[:3], y[:3], small, seed=1)
        yield f"attack.square.{norm}", digest(found)
        yield f"attack.rand.{norm}", digest(atas.attacks.autoattack(model, x[:2], y[:2], small, version="rand"))
    guarded, x, y = Guarded.problem()
    for threat in (atas.Linf(10 / 255), atas.L2(0.25)):
        found = atas.evaluate(guarded, x, y, threat, attacks=["autoattack"], seed=1)
        broken_by = found.broken_by["autoattack"]
        assert {"apgd-ce", "apgd-t", "fab-t", "square"} <= set(broken_by), "every stage breaks something"
        yield f"attack.autoattack.{threat.name}", [masked(found.to_json()), found.queries]
    points = atas.attacks.autoattack(guarded, x[:4], y[:4], atas.Linf(10 / 255), seed=1)
    yield "attack.autoattack.points", digest(points)


_TRAININGS: dict[str, dict[str, Any]] = {
    "ema": {"training.ema": 0.9},
    "piecewise": {"schedule.name": "piecewise", "schedule.milestones": (0.4, 0.8)},
    "cyclic": {"schedule.name": "cyclic", "schedule.peak_at": 0.3, "schedule.peak_momentum": 0.8},
    "nesterov": {"optimizer.nesterov": True, "optimizer.weight_decay": 1e-3},
    "shards": {"data.shards": 4},
    "streaming": {"data.loading": "streaming", "data.workers": 1},
    "views": {"data.pad": 2, "data.flip": True},
    "crop": {"data.view": "crop", "data.view_size": 6, "data.flip": True, "method.grid": 4},
    "resized": {"data.view": "resized", "data.view_size": 8, "data.view_scale": (0.5, 1.0), "method.grid": 4},
    "growing": {
        "data.view": "resized",
        "data.view_size": 8,
        "data.view_start": 6,
        "data.view_ramp": 0.5,
        "method.grid": 4,
    },
    "host": {"method.store": "host"},
    "grid": {"method.grid": 4},
    "float16": {"method.dtype": "float16"},
    "warm-up": {"method.warmup_epochs": 1, "method.reset_every": 2, "training.epochs": 3, "method.clip": (0.02, 0.15)},
    "l2": {"method.norm": "l2", "method.eps": 1.0, "method.max_step": "auto", "method.dtype": "float16"},
    "bf16": {"engine.precision": "bf16"},
    "seed": {"training.seed": 7},
    "held-out": {"training.on_collapse": "rollback"},
}
_REPLAYS = {"free": {"method.replays": 2}, "yopo": {"method.outer": 2}}


def record_trainings() -> Iterator[tuple[str, Any]]:
    for name in atas.methods.names():
        if f"digits-small-cnn-{name}" not in recipes.names():
            continue
        yield f"train.{name}", training(f"runs/{name}", f"digits-small-cnn-{name}", _REPLAYS.get(name, {}))
    for name, values in _TRAININGS.items():
        yield f"train.atas.{name}", training(f"runs/atas-{name}", RECIPE, values)
    yield "train.own", training("runs/own", RECIPE, {}, model=Net(4, channels=1), rows=torch.arange(0, 300, 2))
    yield from interrupted_trainings()
    yield from scripted_collapses()
    yield from by_two_processes()


def training(out: str, recipe: Any, values: dict[str, Any], **options: Any) -> dict[str, Any]:
    shown, logged = io.StringIO(), Logged()
    with contextlib.redirect_stdout(shown):
        options = {"data": digits(), "loggers": [logged], **options}
        run = atas.train(recipe, out=out, values={**QUICK, **values}, **options)
    return of_run(Path(out)) | {
        "said": words(shown.getvalue()),
        "logged": logged.rows,
        "model": digest(run.model.state_dict()),
        "run": sorted(name for name in dir(run) if not name.startswith("_")),
    }


def of_run(folder: Path) -> dict[str, Any]:
    """All that a training leaves in its folder."""
    tensors, state = checkpoint.load(folder / "checkpoints" / "last.safetensors")
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        about = {key: json.loads(text) for key, text in file.metadata().items()}
    return {
        "files": files_in(folder),
        "weights": digest((folder / "model.safetensors").read_bytes()),
        "about": masked(about),
        "checkpoint": digest(tensors),
        "layout": layout(tensors),
        "state": masked(state),
        "metrics": masked([json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]),
        "recipe": masked((folder / "recipe.toml").read_text()),
        "environment": masked(json.loads((folder / "environment.json").read_text())),
    }


class Logged:
    """A logger that keeps what it is told, and may ask the training to stop, as Ctrl-C does, after an epoch."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.rows: list[Any] = []
        self._stop_after = stop_after

    def start(self, epoch: int) -> None:
        self.rows.append(["start", epoch])

    def log(self, epoch: int, scalars: Any, histograms: Any) -> None:
        self.rows.append([epoch, masked(dict(scalars)), {name: digest(values) for name, values in histograms.items()}])
        if epoch == self._stop_after:
            signal.raise_signal(signal.SIGINT)

    def close(self) -> None:
        self.rows.append("close")


def interrupted_trainings() -> Iterator[tuple[str, Any]]:
    """Stopped after the first batch of the second epoch, and gone on with."""
    for name in ("atas", "free", "trades"):
        values = {"training.epochs": 3, "training.ema": 0.9, **_REPLAYS.get(name, {})}
        out, recipe = f"runs/interrupted-{name}", f"digits-small-cnn-{name}"
        try:
            training(out, recipe, values, loggers=[Logged(stop_after=0)])
        except atas.AtasError as stop:
            yield f"train.stopped.{name}", [type(stop).__name__, masked(str(stop)), files_in(Path(out))]
        tensors, state = checkpoint.load(Path(out, "checkpoints", "last.safetensors"))
        yield f"train.stopped.{name}.checkpoint", [digest(tensors), masked(state)]
        yield f"train.resumed.{name}", training(out, recipe, values, resume=True)
        whole = training(f"runs/whole-{name}", recipe, values)
        yield f"train.whole.{name}", [whole["checkpoint"], whole["model"]]


def scripted_collapses() -> Iterator[tuple[str, Any]]:
    """The monitor sees a collapse in the third epoch, and a breakdown later on."""
    healthy, collapsed, lost = ProbeResult(0.9, 0.6, 0.5), ProbeResult(0.9, 0.95, 0.02), ProbeResult(0.1, 0.1, 0.1)
    for what in ("warn", "stop", "rollback"):
        seen = iter([healthy, healthy, collapsed, healthy, lost, lost, lost, lost])
        with mock.patch.object(Monitor, "probe", lambda *_, seen=seen, **__: next(seen)):
            values = {"training.epochs": 6, "training.on_collapse": what}
            yield f"train.collapse.{what}", training(f"runs/collapse-{what}", RECIPE, values)


def by_two_processes() -> Iterator[tuple[str, Any]]:
    """One training and one evaluation shared by two processes, over gloo."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    shared |= {"GLOO_SOCKET_IFNAME": "lo"}
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", "runs/two"],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [worker.communicate(timeout=300)[0] for worker in workers]
    assert not any(worker.returncode for worker in workers), "\n".join(outputs)
    yield "train.two-processes", of_run(Path("runs/two"))
    yield "evaluate.two-processes", masked(json.loads(Path("runs/two/evaluation.json").read_text()))


def work_as_one_of_two(folder: str) -> None:
    sys.argv = ["atas"]
    torch.distributed.init_process_group("gloo")
    values = {**QUICK, "data.shards": 2, "training.ema": 0.9}
    run = atas.train(RECIPE, out=folder, values=values, data=digits())
    test = digits().test
    result = atas.evaluate(run.model, test, threat=atas.Linf(0.1), attacks=["fgsm", "pgd10x2", "apgd-t"], shard=True)
    if torch.distributed.get_rank() == 0:
        result.save(Path(folder, "evaluation.json"))
    torch.distributed.destroy_process_group()


# Models that an evaluation has to warn about: what is put before or behind a network.
_BAD: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "healthy": (lambda x: x, lambda z: z),
    "batch": (lambda x: x - 0.5 * x.mean(0), lambda z: z),
    "softmax": (lambda x: x, lambda z: z.softmax(1)),
    "log-softmax": (lambda x: x, lambda z: z.log_softmax(1)),
    "quantised": (lambda x: (5 * x).round() / 5, lambda z: z),
    "saturated": (lambda x: x, lambda z: 1e4 * z),
    "not-a-number": (lambda x: x, lambda z: z + (z[:, :1] - 1e9).sqrt() * 0),
    "infinite": (lambda x: x, lambda z: z * torch.where(z.argmax(1, keepdim=True) == 3, torch.inf, 1.0)),
    "waves": (lambda x: x + 3 * torch.sin(100 * x) / 100, lambda z: z),
}


class Around(nn.Module):
    def __init__(self, model: nn.Module, before: Any, behind: Any) -> None:
        super().__init__()
        self.model, self.before, self.behind = model, before, behind

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(self.model(self.before(x)))


def record_evaluations() -> Iterator[tuple[str, Any]]:
    """Of a model that was trained by the command, and of models that are bad in some way."""
    values = {**QUICK, "training.epochs": 6, "training.loggers": "[]", "method.max_step": 0.2}
    settings = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    yield "cli.train", said("train", RECIPE, "--out", "runs/trained", *settings)
    yield "cli.train.again", said("train", RECIPE, "--out", "runs/trained", *settings)
    yield "cli.train.resume", said("train", "--resume", "--out", "runs/trained", "--json")
    wanted = ("--attacks", "fgsm,pgd10x2,autoattack", "--examples", 12)
    yield "cli.evaluate", said("evaluate", "runs/trained", *wanted, "--device", "cpu")
    yield "evaluate.result", masked(json.loads(Path("runs/trained/evaluation.json").read_text()))
    yield "evaluate.markdown", text_of(Path("runs/trained/evaluation.md"))
    options = ("--attacks", "pgd4", "--step-size", "2/255", "--eps", "16/255", "--seed", 3, "--out", "other.json")
    status, out, _ = command("evaluate", "runs/trained", *options, "--examples", 50, "--json")
    yield "cli.evaluate.json", [status, masked(json.loads(out))]
    model, test = atas.load("runs/trained"), digits().test
    yield "load", digest(model.state_dict())
    sample = test.part(slice(40))
    found = atas.evaluate(model, sample, threat=atas.L2(0.5), attacks=["fgsm", "pgd10", "apgd-ce"], batch_size=16)
    yield "evaluate.l2", [masked(found.to_json()), words(str(found)), masked(found.sentence()), masked(repr(found))]
    yield "evaluate.progress", of_stopped_evaluation(model, sample)
    for name, (before, behind) in _BAD.items():
        found = atas.evaluate(Around(model, before, behind), sample, threat=atas.Linf(0.1), attacks=["fgsm", "pgd10"])
        warnings = [[warning.kind, str(warning)] for warning in found.warnings]
        yield f"evaluate.bad.{name}", [warnings, {key: digest(value) for key, value in found.correct.items()}]


class EnoughError(Exception):
    """Ends an evaluation from within."""


def of_stopped_evaluation(model: nn.Module, sample: Any) -> list[Any]:
    """The progress file of an evaluation that was stopped, and what the same call finds when it goes on."""
    notes: list[Any] = []

    def stop(status: Any) -> None:
        notes.append([status.attack, status.stage, status.num_correct, status.examples, status.note])
        if (status.attack, status.stage) == ("apgd-t", "apgd-t"):
            raise EnoughError

    def call(progress: Any) -> atas.Evaluation:
        attacks = ["pgd10x2", "apgd-t"]
        options = {"attacks": attacks, "progress_file": "progress.json", "progress": progress}
        return atas.evaluate(model, sample, threat=atas.Linf(0.1), **options)

    with contextlib.suppress(EnoughError):
        call(stop)
    kept = masked(json.loads(Path("progress.json").read_text()))
    found = call(lambda status: status.note and notes.append(status.note))
    return [kept, masked(notes), masked(found.to_json())]


def record_files() -> Iterator[tuple[str, Any]]:
    """What is made of a run for people and for other programs; `record_evaluations` trained it."""
    yield "cli.report", said("report", "runs/trained")
    yield "report.one", page_of(Path("runs/trained/report.html"))
    yield "cli.report.two", said("report", "runs/trained", "runs/fgsm-rs", "--out", "report.html")
    yield "report.two", page_of(Path("report.html"))
    yield "cli.compare", said("compare", "runs/trained", "runs/fgsm-rs", "runs/collapse-warn")
    status, out, _ = command("compare", "runs/trained", "runs/fgsm-rs", "--json", "--plot", "curves.svg")
    yield "compare.json", [status, masked(json.loads(out))]
    yield "compare.plot", curves_in(Path("curves.svg"))
    pixels = digits().test.images[:5].float() / 255
    for to in atas.export.FORMATS:
        status, out, err = command("export", "runs/trained", "--to", to, "--json")
        folder = Path("runs/trained/export", to)
        # Archives hold times: of those, what the model in them answers.
        content = {path.name: exported(path, pixels) for path in sorted(folder.iterdir())}
        yield f"export.{to}", [status, masked(json.loads(out)) if not status else words(err), content]
    loaded = atas.load("runs/trained/export/safetensors/model.safetensors")
    yield "export.load", digest(loaded(pixels))
    plan = ("--methods", "atas,fgsm-rs", "--attacks", "fgsm,pgd2", "--examples", 20, "--set", "training.epochs=2")
    yield "cli.reproduce", said("reproduce", "table-cifar10", "--quick", *plan, "--out", "plan")
    yield "reproduce.files", files_in(Path("plan"))
    for path in sorted(Path("plan", "runs").glob("*.json")):
        yield f"reproduce.record.{path.name}", masked(json.loads(path.read_text()))
    yield "reproduce.page", text_of(Path("plan/table-cifar10-quick.md"))


def exported(path: Path, pixels: Tensor) -> Any:
    if path.suffix == ".md":
        return text_of(path)
    if path.suffix == ".pt2":
        return digest(torch.export.load(path).module()(pixels))
    if path.suffix == ".onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return digest(session.run(None, {session.get_inputs()[0].name: pixels.numpy()})[0].tobytes())
    return digest(masked(path.read_text())) if path.suffix in (".py", ".json") else digest(path.read_bytes())


def curves_in(path: Path) -> str:
    """The lines of a plot; names of its parts are made up by matplotlib."""
    return digest(re.findall(r'<path d="([^"]*)"', path.read_text()))


def record_data() -> Iterator[tuple[str, Any]]:
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for number in range(24):
        path = Path("photos", ("train", "test")[number % 2], "ab"[number // 2 % 2], f"{number}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (40 + number, 48, 3), dtype=np.uint8)).save(path)
        os.utime(path, (0, 0))  # which packed sets note
    yield "data.check", said("data", "check", "imagefolder", "--root", "photos", "--size", 32)
    yield "data.folder", of_data(atas.data.load("imagefolder", "photos", size=32))
    for form in ("raw", "jpeg"):
        yield f"data.pack.{form}", said("data", "pack", "photos", f"packed-{form}", "--size", 32, "--format", form)
        folder = Path(f"packed-{form}")
        yield f"data.packed.{form}.files", {path.name: digest(path.read_bytes()) for path in sorted(folder.iterdir())}
        yield f"data.packed.{form}", of_data(atas.data.load("packed", folder))
        yield f"data.verify.{form}", said("data", "verify", folder)
    yield "data.digits", of_data(atas.data.load("digits"))
    x, y = rng.random((6, 1, 4, 4)), np.arange(6) % 2
    yield "data.arrays", of_data(atas.data.from_arrays("mine", x, y, x[:2], y[:2]))
    yield "data.indexed", [[digest(thing) for thing in row] for row in atas.indexed([(torch.ones(1, 2, 2), 3)] * 2)]
    yield "data.hashes", [atas.data.official_hashes(name) for name in atas.data.names()]


def of_data(found: atas.data.Dataset) -> Any:
    splits = [
        [len(split), digest(split.images[:]), digest(split.labels[:]), split.classes]
        for split in (found.train, found.test)
    ]
    return [found.name, found.num_classes, list(found.shape), masked(splits)]


PARTS: dict[str, Callable[[], Iterator[tuple[str, Any]]]] = {
    "api": record_api,
    "cli": record_cli,
    "recipes": record_recipes,
    "studies": record_studies,
    "numbers": record_numbers,
    "models": record_models,
    "methods": record_methods,
    "attacks": record_attacks,
    "data": record_data,
    "trainings": record_trainings,
    "evaluations": record_evaluations,
    "files": record_files,  # needs the runs of the two before it
}


# The program


def record(parts: list[str]) -> Entries:
    """The entries of these parts, made in a folder that is then removed."""
    assert Path(atas.__file__).is_relative_to(ROOT / "src"), f"atas was imported from {atas.__file__}"
    entries: Entries = {"machine": [torch.__version__, sys.version, torch.backends.cpu.get_cpu_capability()]}
    before = Path.cwd()
    # Results note the command by which they were made.
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(sys, "argv", ["atas"]):
        os.chdir(folder)
        os.environ |= {"HOME": folder, "XDG_CACHE_HOME": folder, "MPLCONFIGDIR": folder}
        try:
            for name in parts:
                began, count = time.monotonic(), len(entries)
                for key, value in PARTS[name]():
                    assert key not in entries, f"two entries are named {key}"
                    entries[key] = json.loads(json.dumps(value, default=repr))
                print(f"{name}: {len(entries) - count} entries, {time.monotonic() - began:.1f} s", file=sys.stderr)
        finally:
            os.chdir(before)
    return entries


def compare(old: Entries, new: Entries, skip: tuple[str, ...] = ()) -> list[str]:
    """The entries that differ, each with the first place at which it does."""
    found = []
    for key in sorted(old.keys() | new.keys()):
        if key.startswith(skip):
            continue
        if key not in old or key not in new:
            found.append(f"{key}: only in the {'new' if key in new else 'old'} record")
        elif old[key] != new[key]:
            found.append(f"{key}: {difference(old[key], new[key])}")
    return found


def difference(old: Any, new: Any, place: str = "") -> str:
    """Where two values differ first, and how."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [key for key in old.keys() | new.keys() if old.get(key, ...) != new.get(key, ...)]
        key = min(keys, default=None)
        if key is None:
            return f"{place} keys are in another order"
        if key in old and key in new:
            return difference(old[key], new[key], f"{place}[{key}]")
        return f"{place}[{key}] only in the {'new' if key in new else 'old'} record"
    if isinstance(old, list) and isinstance(new, list):
        for number, (one, other) in enumerate(zip(old, new, strict=False)):
            if one != other:
                return difference(one, other, f"{place}[{number}]")
        return f"{place} has {len(old)} items and now {len(new)}"
    return f"{place} was {old!r} and is {new!r}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, help="the file to write")
    parser.add_argument("--parts", help=f"only these, comma-separated: {', '.join(PARTS)}")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("OLD", "NEW"), help="show what differs, exit 1 if so")
    parser.add_argument("--skip", default="", help="entries to leave out of a comparison, such as cli.help,cli.call")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.worker:
        work_as_one_of_two(given.worker)
    elif given.compare:
        old, new = (json.loads(path.read_text()) for path in given.compare)
        found = compare(old, new, tuple(filter(None, given.skip.split(","))))
        print("\n".join(found) or f"{len(old)} entries agree")
        sys.exit(bool(found))
    elif given.out:
        out = given.out.resolve()
        entries = record(given.parts.split(",") if given.parts else list(PARTS))
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")
        print(f"{len(entries)} entries in {out}", file=sys.stderr)
    else:
        parser.error("name the file to write, or --compare two of them")


if __name__ == "__main__":
    main()
