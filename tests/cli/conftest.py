"""The command, called in this process for what it says and in one of its own for its exit status."""

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import pytest

from atas import cli

TINY = """\
[data]
name = "digits"
pad = 1
flip = false

[model]
name = "small-cnn"

[method]
name = "atas"
eps = 0.1

[training]
epochs = 1
batch_size = 512
probe = 50

[engine]
device = "cpu"

[evaluation]
attacks = ["fgsm"]
examples = 40
"""


@dataclass(frozen=True)
class Result:
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
    """Run the command in this process: `command("ls", "methods")`."""

    def run(*arguments):
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.setattr(sys, "argv", ["atas", *map(str, arguments)])
        status = 0
        with redirect_stdout(out), redirect_stderr(err):
            try:
                cli.main()
            except SystemExit as end:
                status = end.code or 0
        return Result(status, out.getvalue(), err.getvalue())

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


@pytest.fixture
def tiny(tmp_path):
    """A recipe file of one epoch of three steps."""
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The folder of a finished run; not to be changed."""
    import atas

    folder = tmp_path_factory.mktemp("runs")
    (folder / "tiny.toml").write_text(TINY)
    with redirect_stdout(io.StringIO()):
        atas.train(folder / "tiny.toml", out=folder / "first")
    return folder / "first"


@pytest.fixture
def unfinished(tmp_path, finished):
    """The folder of a run that has begun and has not finished."""
    folder = tmp_path / "unfinished"
    folder.mkdir()
    for name in ("recipe.toml", "environment.json", "metrics.jsonl"):
        (folder / name).write_bytes((finished / name).read_bytes())
    return folder


@pytest.fixture
def copy_of(tmp_path, finished):
    """A finished run to do things to."""

    def make(name="copy"):
        folder = tmp_path / name
        for path in finished.rglob("*"):
            if path.is_file():
                target = folder / path.relative_to(finished)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(path.read_bytes())
        return folder

    return make


@pytest.fixture
def contents():
    """All files of a folder, to see that none was lost."""

    def read(folder):
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    return read


@pytest.fixture
def evaluate_json(command):
    """The result of `atas evaluate --json`."""

    def run(*arguments):
        result = command("evaluate", *arguments, "--json")
        assert result.status == 0, result
        return json.loads(result.out)

    return run
