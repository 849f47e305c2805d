"""The driver of the measurements to come: what it runs, stops, records and continues; with commands of milliseconds."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "evidence.py"
# A command that needs three calls of a second each, and says how often it was interrupted.
SLOW = """
import pathlib, sys, time
steps = pathlib.Path(sys.argv[1])
try:
    while len(done := steps.read_text() if steps.exists() else "") < 30:
        time.sleep(0.1)
        steps.write_text(done + ".")
except KeyboardInterrupt:
    sys.exit("saved")
"""


@pytest.fixture
def drive(tmp_path):
    """Run the driver on a list of (name, command, seconds, other keys) in a process of its own."""

    def make_list(*commands):
        lines = []
        for name, command, seconds, *more in commands:
            entry = {"name": name, "why": "w", "command": command, "result": "r", **(more[0] if more else {})}
            lines += ["[[commands]]", f"seconds = {seconds}", *(f"{k} = {json.dumps(v)}" for k, v in entry.items())]
        (tmp_path / "list.toml").write_text("\n".join(lines), encoding="utf-8")

    def start(*options):
        words = [sys.executable, str(SCRIPT), "--list", str(tmp_path / "list.toml"), "--out", str(tmp_path / "out")]
        return subprocess.Popen(
            [*words, *map(str, options)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path
        )

    def run(*commands, options=()):
        make_list(*commands)
        process = start(*options)
        return process.communicate(timeout=100)[0], process.returncode

    run.start, run.make_list = start, make_list
    return run


@pytest.fixture
def rows(tmp_path):
    def read():
        path = tmp_path / "out" / "evidence.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    return read


def statuses(rows):
    return [(row["name"], row["status"]) for row in rows]


@pytest.mark.slow
def test_a_failure_is_said_and_the_rest_runs(drive, rows, tmp_path):
    good = f"""python -c "open(r'{tmp_path}/seen', 'a').write('x')" """
    commands = [("bad", """python -c "raise SystemExit('no data')" """, 1), ("good", good, 1)]
    said, status = drive(*commands)
    assert status == 1
    assert "bad: failed after 0 s: no data" in said
    assert "failed: bad" in said
    assert statuses(rows()) == [("bad", "failed"), ("good", "finished")]
    assert all({"seconds", "commit", "date", "command"} <= row.keys() for row in rows())
    assert (tmp_path / "out" / "bad.log").read_text() == "no data\n"
    drive(*commands, ("later", "python -c pass", 1))
    assert statuses(rows())[2:] == [("later", "finished"), ("bad", "failed")], "what failed comes last"
    said, status = drive(*commands, ("later", "python -c pass", 1), options=("--dry-run",))
    assert re.findall(r"^(\w+) +1 s  (\w+)", said, re.MULTILINE) == [
        ("failed", "bad"),
        ("finished", "good"),
        ("finished", "later"),
    ]
    assert len(rows()) == 4
    assert (tmp_path / "seen").read_text() == "x", "a finished command is not repeated"
    drive(("good", good + " again", 1))
    assert len(rows()) == 5, "a command that was changed counts as not run"


@pytest.mark.slow
def test_when_the_time_is_up_a_command_is_interrupted_and_continues_at_the_next_call(drive, rows, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW, encoding="utf-8")
    slow = f"python {tmp_path / 'slow.py'} {tmp_path / 'steps'}"
    commands = ("slow", slow, 3), ("next", "python -c pass", 1)
    minutes = (25 + 1.5) / 60  # the last 25 s are for stopping
    # an estimate of a second, so that it is begun although it will not end
    said, status = drive(("slow", slow, 1), commands[1], options=("--minutes", minutes))
    assert status == 0
    assert statuses(rows()) == [("slow", "stopped")], said
    assert 0 < len((tmp_path / "steps").read_text()) < 30
    assert (tmp_path / "out" / "slow.log").read_text() == "saved\n"
    drive(*commands)
    assert statuses(rows())[1:] == [("slow", "finished"), ("next", "finished")]
    assert len((tmp_path / "steps").read_text()) == 30


@pytest.mark.slow
def test_nothing_is_started_that_cannot_end_unless_it_can_be_resumed(drive, rows):
    commands = [("long", "python -c pass", 500), ("once", "python -c pass", 100, {"resumes": False})]
    commands += [("short", "python -c pass", 10)]
    drive(*commands, options=("--minutes", 1.5, "--only", "long", "once"))
    assert statuses(rows()) == [("long", "finished")]
    drive(*commands, options=("--minutes", 1.5, "--whole"))
    assert statuses(rows())[1:] == [("short", "finished")]
    drive(*commands, options=("--minutes", 2.5, "--only", "on*"))
    assert statuses(rows())[2:] == [("once", "finished")]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_of_the_driver_reaches_the_command(number, drive, rows, tmp_path):
    (tmp_path / "slow.py").write_text(SLOW, encoding="utf-8")
    drive.make_list(("slow", f"python {tmp_path / 'slow.py'} {tmp_path / 'steps'}", 3), ("next", "python -c pass", 1))
    process = drive.start()
    while not (tmp_path / "steps").exists():
        time.sleep(0.05)
    os.kill(process.pid, number)
    assert process.communicate(timeout=60)
    assert process.returncode == 1
    assert statuses(rows()) == [("slow", "stopped")]


# Notes when it begins and ends, and waits a moment in between.
NOTING = """
import sys, time
for word in ("begins", "ends"):
    with open(sys.argv[1], "a") as file:
        file.write(f"{sys.argv[2]} {word}\\n")
    time.sleep(0.5)
"""


@pytest.mark.slow
def test_several_commands_run_at_a_time_but_timed_ones_alone(drive, rows, tmp_path):
    (tmp_path / "noting.py").write_text(NOTING, encoding="utf-8")
    names = ("a", "b", "c", "timed", "d", "e")
    commands = [
        (n, f"python {tmp_path / 'noting.py'} {tmp_path / 'notes'} {n}", 1, {"timed": n == "timed"}) for n in names
    ]
    said, status = drive(*commands, options=("--jobs", 3))
    assert status == 0, said
    assert {name for name, ended in statuses(rows()) if ended == "finished"} == set(names)
    notes = (tmp_path / "notes").read_text().split("\n")[:-1]
    assert set(notes[:3]) == {"a begins", "b begins", "c begins"}, notes
    assert notes[6:8] == ["timed begins", "timed ends"], notes
    assert set(notes[8:10]) == {"d begins", "e begins"}, notes


@pytest.mark.slow
def test_estimates_count_the_jobs(drive, rows):
    commands = ("long", "python -c pass", 40), ("timed", "python -c pass", 40, {"timed": True})
    drive(*commands, options=("--minutes", 1.5, "--whole", "--jobs", 2))
    assert statuses(rows()) == [("timed", "finished")]


def test_a_name_that_is_not_in_the_list(drive):
    said, status = drive(("one", "python -c pass", 1), options=("--only", "two"))
    assert status == 2
    assert "no command is called two" in said


def test_names_are_unique(drive):
    said, status = drive(("one", "python -c pass", 1), ("one", "python -c pass", 1))
    assert status == 1
    assert "several commands called one" in said


def test_the_page_shows_the_list():
    evidence = runpy.run_path(str(SCRIPT))
    table = evidence["table"](evidence["read"](evidence["LIST"]))
    assert table in (ROOT / "docs" / "reproducing.md").read_text("utf-8"), "run: python benchmarks/evidence.py --page"
