"""The example programs run; those for other packages if these are installed."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import atas

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*arguments: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_minimal_example(monkeypatch, capsys):
    """Run it in this process, on fewer digits."""
    example = EXAMPLES / "minimal.py"
    assert len(example.read_text(encoding="utf-8").splitlines()) < 100
    whole = atas.data.load("digits")
    small = atas.data.Dataset(whole.name, whole.train.part(slice(256)), whole.test.part(slice(40)))
    monkeypatch.setattr(atas.data, "load", {"digits": small}.__getitem__)
    monkeypatch.setattr(sys, "argv", [str(example), "--epochs", "2"])
    runpy.run_path(str(example), run_name="__main__")
    shown = capsys.readouterr().out
    assert "epoch  2" in shown
    assert "pgd50" in shown
    assert "/40" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "packages"),
    [("lightning_atas.py", ["lightning"]), ("transformers_atas.py", ["transformers", "accelerate"])],
)
def test_examples_that_watch_the_training_and_resume(example, packages, tmp_path):
    for package in packages:
        pytest.importorskip(package)
    program = str(EXAMPLES / example)
    shown = run(program, "--epochs", "1", "--folder", "out", cwd=tmp_path)
    assert "epoch  1  clean " in shown
    assert "worst" in shown
    shown = run(program, "--epochs", "2", "--folder", "out", "--resume", cwd=tmp_path)
    assert "epoch  1" not in shown
    assert "epoch  2  clean " in shown


def test_the_example_for_accelerate(tmp_path):
    pytest.importorskip("accelerate")
    shown = run(str(EXAMPLES / "accelerate_atas.py"), "--epochs", "1", "--save", "state", cwd=tmp_path)
    assert "epoch  1" in shown
    assert "pgd50" in shown
    assert list((tmp_path / "state").glob("custom_checkpoint_0*"))  # the method's perturbations
