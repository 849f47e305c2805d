"""The Python blocks of docs/export.md run as they stand, where there is a run."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "export.md"


def test_the_blocks_of_the_page(evaluated, tmp_path):
    shutil.copytree(evaluated, tmp_path / "runs" / "mine")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "checked in" in done.stdout
    assert "from epoch 0\n0 " in done.stdout
