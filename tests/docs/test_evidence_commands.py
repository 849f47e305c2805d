"""The commands for evidence that is not run yet: each has something to run, and ends in the file that is named."""

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EVIDENCE = runpy.run_path(str(ROOT / "benchmarks" / "evidence.py"))
ITEMS = {item.name: item for item in EVIDENCE["read"](EVIDENCE["LIST"])}
STUDIES = [name for name, item in ITEMS.items() if item.command.startswith("atas reproduce ")]
VARIANTS = [name for name, item in ITEMS.items() if "benchmarks/record.py" in item.command]
PUBLISHED = [name for name, item in ITEMS.items() if "scripts/publish.py" in item.command]


def test_every_command_is_of_a_known_kind():
    assert set(ITEMS) - {"record-pieces"} == {*STUDIES, *VARIANTS, *PUBLISHED}


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_the_command_is_a_plan(name, command, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    _, verb, study, *words = shlex.split(ITEMS[name].command)
    place = words.index("--out")
    status, out, err = command(verb, study, *words[:place], "--out", tmp_path, "--dry-run")
    assert status == 0, err
    runs = int(re.search(r"^(\d+) of \d+ runs to do", out, re.MULTILINE)[1])
    assert runs > 0
    assert words[place + 1].startswith("results/")
    assert ITEMS[name].result == f"{words[place + 1]}/{study}.md"


@pytest.mark.parametrize("name", VARIANTS)
def test_the_variants_exist_and_are_not_done(name, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    _, script, *words = shlex.split(ITEMS[name].command)
    monkeypatch.setattr(sys, "argv", [script, *words, "--table"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(script, run_name="__main__")
    assert end.value.code == 0
    chosen = words[words.index("--only") + 1 :]
    chosen = chosen[: next(number for number, word in enumerate(chosen) if word.startswith("--"))]
    open_runs = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.endswith("not done")]
    assert set(chosen) <= set(open_runs)
    assert ITEMS[name].result == f"{words[words.index('--out') + 1]}/runs"


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_published_was_trained_before(name):
    program, script, recipe = shlex.split(ITEMS[name].command)
    assert (program, script) == ("python", "scripts/publish.py")
    assert ITEMS[name].result == f"weights/{recipe}"
    read = runpy.run_path(str(ROOT / "benchmarks" / "record.py"))["read"]
    earlier = " ".join(ITEMS[other].command for other in list(ITEMS)[: list(ITEMS).index(name)])
    variants = read(ROOT / "benchmarks" / "record-test.toml")
    (variant,) = [key for key, trials in variants.items() if trials[0].recipe == recipe]
    assert f"--only {variant} --seeds 0" in earlier
