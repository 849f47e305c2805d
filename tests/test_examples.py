"""The example programs run as they stand; those for other packages where these are installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(*arguments: str, cwd: Path) -> str:
    found = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_the_minimal_example(tmp_path):
    example = EXAMPLES / "minimal.py"
    assert len(example.read_text(encoding="utf-8").splitlines()) < 100
    shown = run(str(example), "--epochs", "1", cwd=tmp_path)
    assert "epoch  1" in shown
    assert "pgd50" in shown


def test_the_example_for_lightning(tmp_path):
    pytest.importorskip("lightning")
    assert "pgd50" in run(str(EXAMPLES / "lightning_atas.py"), "--epochs", "1", cwd=tmp_path)


def test_the_example_for_accelerate(tmp_path):
    pytest.importorskip("accelerate")
    shown = run(str(EXAMPLES / "accelerate_atas.py"), "--epochs", "1", "--save", "state", cwd=tmp_path)
    assert "epoch  1" in shown
    assert "pgd50" in shown
    assert list((tmp_path / "state").glob("custom_checkpoint_0*"))  # the method's perturbations
