"""Every claim of docs/security.md has tests, which its comments name."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


def claims():
    for heading in ("What runs code", "What is checked"):
        section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
        yield from re.findall(r"(?ms)^- (.*?)(?=^- |^\S|\Z)", section)


def test_every_claim_names_its_tests():
    found = list(claims())
    assert len(found) > 8
    for claim in found:
        tests = re.findall(r"tests/[\w/]+\.py(?:::\w+)?", claim)
        assert tests, claim
        for test in tests:
            file, _, name = test.partition("::")
            functions = {n.name for n in ast.parse((ROOT / file).read_text()).body if isinstance(n, ast.FunctionDef)}
            assert not name or name in functions, test


def test_every_command_is_on_the_page():
    from atas.cli import app

    names = [command.name for command in app.registered_commands] + [group.name for group in app.registered_groups]
    assert [name for name in names if f"`atas {name}" not in PAGE and name != "ls"] == []
