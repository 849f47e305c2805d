"""The commands for evidence that is not run yet: each is a plan with something to run."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (
    (ROOT / "docs" / "reproducing.md").read_text("utf-8").partition("## Evidence not run yet")[2].partition("\n## ")[0]
)
COMMANDS = re.findall(r"^\| [^|]+ \| `([^`]+)` \| [\d,]+ \|$", TEXT, re.MULTILINE)


def test_the_table_is_read():
    assert len(COMMANDS) > 20


@pytest.mark.slow
@pytest.mark.parametrize("text", COMMANDS)
def test_the_command_is_a_plan(text, command, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(text)
    place = words.index("--out")
    status, out, err = command("reproduce", *words[:place], "--out", tmp_path, "--dry-run")
    assert status == 0, err
    runs = int(re.search(r"^(\d+) of \d+ runs to do", out, re.MULTILINE)[1])
    assert runs > 0
    assert words[place + 1].startswith("results/")
