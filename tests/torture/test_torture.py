"""A small part of the fault suite; `make torture` runs all of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PARTS = {"kills", "mutations", "values", "misuse", "machines", "pairs"}


@pytest.mark.slow
def test_no_case_of_the_fault_suite_is_bad(tmp_path):
    tests = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")])}
    words = ["-m", "torture", "--scale", "0.02", "--seed", "1", "--jobs", "1", "--out", str(tmp_path / "cases.json")]
    ended = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    cases = json.loads((tmp_path / "cases.json").read_text())
    assert {case["part"] for case in cases} == PARTS
    assert all(case["outcome"] in ("same", "sentence") for case in cases)
