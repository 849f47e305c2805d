"""What people copy: the Python blocks of README and of pages, and the minimal example, run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [(ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/memory.md")]
BLOCKS = [block for page in PAGES for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)]


def run(*arguments: str, cwd: Path) -> str:
    found = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout


@pytest.mark.parametrize("block", BLOCKS, ids=[block.splitlines()[-1][:40] for block in BLOCKS])
def test_a_block_of_a_page(block, tmp_path):
    run("-c", block, cwd=tmp_path)


def test_the_minimal_example(tmp_path):
    example = ROOT / "examples" / "minimal.py"
    assert len(example.read_text(encoding="utf-8").splitlines()) < 100
    shown = run(str(example), "--epochs", "1", cwd=tmp_path)
    assert "epoch  1" in shown
    assert "pgd50" in shown
