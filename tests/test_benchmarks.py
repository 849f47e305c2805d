"""Benchmarks in a small form: they run, and what they say of a memory holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("store", ["host", "device"])
def test_the_memory_of_a_large_set(store, tmp_path):
    small = ["--examples", "60", "--size", "28", "--batch", "8", "--steps", "6", "--grid", "4", "--model", "small-cnn"]
    small += ["--device", "cpu", "--precision", "float32", "--store", store, "--json", str(tmp_path / "found.json")]
    script = str(ROOT / "benchmarks" / "host_memory.py")
    done = subprocess.run([sys.executable, script, *small], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found["memory_gigabytes"] == pytest.approx(60 * 3 * 4 * 4 / 1e9)
    assert found["steps"] == 6
    assert found["in_both_epochs"] > 0
    assert found["changed_of_trained"] == 1
    assert found["changed_of_others"] == 0
    assert "images_a_second" in done.stdout
    assert found["environment"]["command"].startswith("host_memory.py")
