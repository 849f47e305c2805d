"""Help, completion and mistakes do not wait for torch."""

import json
import os
import subprocess
import sys

import pytest
import typer.main

from atas.cli import app

# Calls the command again and again in one process, and tells of each call how it ended and whether torch is there.
SCRIPT = """
import contextlib, io, json, sys
from atas.cli import main

told = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["atas", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
            status = 0
        except SystemExit as end:
            status = end.code or 0
    told.append([status, out.getvalue(), err.getvalue(), "torch" in sys.modules or "numpy" in sys.modules])
print(json.dumps(told))
"""


def paths(command, path=()):
    """The words of all commands and sub-commands."""
    yield path
    for name, sub in getattr(command, "commands", {}).items():
        yield from paths(sub, (*path, name))


@pytest.fixture
def calls(tmp_path):
    """Make these calls in one new process; of each its arguments, status, output, errors, and whether torch came."""

    def run(*several, **environment):
        command = [sys.executable, "-c", SCRIPT, json.dumps(several)]
        options = {"capture_output": True, "text": True, "cwd": tmp_path, "env": os.environ | environment}
        done = subprocess.run(command, **options, check=False)
        assert done.returncode == 0, done.stderr
        return [(arguments, *told) for arguments, told in zip(several, json.loads(done.stdout), strict=True)]

    return run


@pytest.mark.slow
def test_help_and_version(calls):
    helps = [[*path, "--help"] for path in paths(typer.main.get_command(app))]
    assert len(helps) > 12
    for arguments, status, out, err, torch in calls(["--version"], *helps):
        assert (status, err, torch) == (0, "", False), arguments
        assert out.startswith("Usage: " if "--help" in arguments else "0."), arguments


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["atas", ""], "train"),
        (["atas", "ls", ""], "methods"),
        (["atas", "train", ""], "cifar100-wrn-28-10-ssat-eps4"),
        (["atas", "train", "--"], "--resume"),
        (["atas", "bench", "digits"], "digits-small-cnn-atas"),
        (["atas", "reproduce", ""], "table-cifar10"),
        (["atas", "export", "--to", ""], "torch-export"),
        (["atas", "data", ""], "verify"),
        (["atas", "train", "x", "--set", "sched"], "schedule.peak="),
        (["atas", "evaluate", "runs/x", "--attacks", "fgsm,"], "fgsm,autoattack"),
    ],
    ids=str,
)
def test_completion(words, offered, calls):
    asked = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    ((_, status, out, _, torch),) = calls([], _ATAS_COMPLETE="complete_bash", **asked)
    assert offered in out.split()
    assert (status, torch) == (0, False)


@pytest.mark.slow
def test_mistakes_are_reported_without_loading_torch(calls):
    found = calls(
        ["trian"],
        ["ls", "methodz"],
        ["train", "--set"],
        ["train"],
        ["train", "--resume"],
        ["train", "digits-small-cnn-atas", "--epochs", "3"],
        ["train", "digits-small-cnn-attas"],
        ["train", "none.toml"],
        ["train", "digits-small-cnn-atas", "--set", "epochs=3"],
        ["bench", "digits-small-cnn-attas"],
        ["bench", "digits-small-cnn-atas", "--set", "epochs=3"],
        ["evaluate"],
        ["evaluate", "--model", "small-cnn", "--data", "digits", "--eps", "0.1"],
        ["evaluate", "--model", "a:b", "--data", "digits"],
        ["evaluate", "runs/mine", "--data", "digits"],
        ["export", "runs/mine", "--to", "pickle"],
        ["reproduce"],
        ["reproduce", "table-cifar"],
        ["reproduce", "table-cifar10", "--set", "epochs=3"],
    )
    for arguments, status, out, err, torch in found:
        assert (status, out, torch) == (2, "", False), arguments
        assert err, arguments


@pytest.mark.slow
def test_work_does_bring_torch(calls):
    """Without this, the tests above could pass for the wrong reason."""
    ((_, status, out, _, torch),) = calls(["ls", "attacks"])
    assert (status, torch) == (0, True)
    assert "autoattack" in out
