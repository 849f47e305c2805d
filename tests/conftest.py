"""What all tests share: one thread, fixed seeds, small networks, the command, work that is killed, and a visible skip
where there is no GPU."""

import functools
import gc
import io
import json
import os
import random
import select
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import hypothesis
import pytest
import torch
import torch.nn.functional as F
import typer.main
from torch import nn

torch.set_num_threads(1)
typer.main.get_command = functools.cache(typer.main.get_command)  # builds every sub-command anew for each call
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it; tests send it
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch.cuda.is_available() is False here")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish():
    """What is imported by now stays: collections of garbage, of which a plan makes one a run, need not look at it."""
    gc.freeze()


class SmallNet(nn.Module):
    """Two convolutions and a linear layer; smooth unless told otherwise, so that no gradient is zero by accident."""

    def __init__(self, channels=3, classes=4, batch_norm=True, activation=F.softplus):
        super().__init__()
        norm = nn.BatchNorm2d if batch_norm else nn.Identity
        self.conv1, self.bn1 = nn.Conv2d(channels, 6, 3, padding=1), norm(6)
        self.conv2, self.bn2 = nn.Conv2d(6, 8, 3, stride=2, padding=1), norm(8)
        self.fc = nn.Linear(8, classes)
        self.activation = activation

    def forward(self, x):
        x = self.activation(self.bn1(self.conv1(x)))
        x = self.activation(self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


def set_seed(number):
    """As `torch.manual_seed`, which on a machine without a GPU notes the stack for each kind of GPU to seed later."""
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(number)


def make_net(*, seed=0, sharpness=1.0, **options):
    """A small network of that seed whose statistics are not the initial ones; `sharpness` scales its logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        set_seed(seed)
        net = SmallNet(**options)
    net.fc.weight.data.mul_(sharpness)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.running_var):
                tensor.data.uniform_(0.5, 1.5, generator=generator)
            for tensor in (module.bias, module.running_mean):
                tensor.data.uniform_(-0.5, 0.5, generator=generator)
    return net


@pytest.fixture(autouse=True)
def _seeded():
    """Every test begins with the same global random state."""
    set_seed(0)


@pytest.fixture
def generator():
    """A generator of the test's own."""
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session")
def small_net():
    """Make small networks: `small_net(batch_norm=False, sharpness=4.0)`."""
    return make_net


@pytest.fixture(scope="session")
def robust_digits():
    """A small network, trained on the digits for two seconds to withstand some of it; and 200 images it has not seen.

    Whoever changes the network puts it back.
    """
    from atas import attacks, data
    from atas.threat import Linf

    torch.manual_seed(0)
    digits = data.load("digits")
    x, y = digits.train.images.float() / 255, digits.train.labels
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), 4e-3)
    for epoch in range(6):
        for batch in torch.randperm(len(x)).split(64):
            point = attacks.pgd(model, x[batch], y[batch], Linf(0.15), 2, 0.1, seed=epoch, index=batch)
            optimizer.zero_grad()
            F.cross_entropy(model(point), y[batch]).backward()
            optimizer.step()
    return model.eval().requires_grad_(False), digits.test.images[:200].float() / 255, digits.test.labels[:200]


@pytest.fixture(scope="session")
def make_images():
    """Make float images whose pixels lie in [0, 1] and, one in four, on its ends."""

    def make(count, shape=(3, 8, 10), seed=0, dtype=torch.float32):
        images = torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return (images * 4 / 3 - 1 / 6).clamp(0, 1).to(dtype)

    return make


class Result(NamedTuple):
    """How a command ended."""

    status: int
    out: str
    err: str

    def sentence(self, *parts, status=None):
        """The one sentence on standard error, which holds these parts."""
        assert self.status == status, self
        assert "Traceback" not in self.err + self.out
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("atas: ")
        assert len(lines[0]) < 1200, f"{len(lines[0])} characters are no sentence"
        for part in parts:
            assert part in lines[0], lines[0]
        return lines[0]


@pytest.fixture
def command(monkeypatch):
    """Run the command in this process: `status, out, err = command("ls", "methods")`, also with its standard output
    into a stream."""
    from atas import cli

    def run(*arguments, out=None):
        out, err = out or io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "argv", ["atas", *map(str, arguments)])
        status = 0
        with redirect_stdout(out), redirect_stderr(err):
            try:
                cli.main()
            except SystemExit as end:
                status = end.code or 0
        return Result(status, out.getvalue() if isinstance(out, io.StringIO) else "", err.getvalue())

    return run


@pytest.fixture(scope="session")
def process():
    """Run the command in a process of its own: `process("--version")`."""

    def run(*arguments, **options):
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | options.pop("env", {})
        done = subprocess.run(
            [sys.executable, "-m", "atas", *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
            **options,
        )
        return Result(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="session")
def forks():
    """Run a script in a fork of a process that has everything imported: `forks(script, argument)`."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    server = subprocess.Popen(
        [sys.executable, "-m", "helpers.forks"],
        cwd=Path(__file__).parent,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )

    def run(script, *arguments):
        settings = {**os.environ, **{name: environment[name] for name in ("OMP_NUM_THREADS", "PYTHONPATH")}}
        job = {"script": str(script), "arguments": arguments, "folder": os.getcwd(), "environment": settings}
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        if not select.select([server.stdout], [], [], 120)[0]:
            os.killpg(server.pid, signal.SIGKILL)
        done = json.loads(server.stdout.readline())
        return Result(done["status"], done["out"], done["err"])

    yield run
    server.stdin.close()
    server.wait()
    server.stdout.close()


@pytest.fixture
def run_script(forks, tmp_path):
    """Run a script that kills its own work (helpers.crash); it gets an order and gives an answer in JSON."""

    def run(script, **order):
        (tmp_path / "script.py").write_text(script)
        places = {name: str(tmp_path / name) for name in ("whole", "killed")}
        seed = int(os.environ.get("ATAS_TEST_SEED") or random.SystemRandom().randrange(1000))
        order = {"seed": seed, **places, **order}
        print(f"order: {order}; repeat with ATAS_TEST_SEED={seed}")  # shown if the test fails
        done = forks(tmp_path / "script.py", json.dumps(order))
        assert done.status == 0, done.err
        return json.loads(done.out)

    return run
