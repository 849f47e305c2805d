"""Run the measurements that are still to be made, in order of priority, for as long as there is time.

    python benchmarks/evidence.py --dry-run                 # what is finished, and what would run
    python benchmarks/evidence.py                           # run what is not finished
    python benchmarks/evidence.py --minutes 9               # stop within nine minutes; the next call continues there
    python benchmarks/evidence.py --minutes 9 --whole       # start only commands that are expected to end in time
    python benchmarks/evidence.py --only 'record-*'         # these alone; names may be patterns
    python benchmarks/evidence.py --jobs 4                  # four at a time, but those alone whose seconds count
    python benchmarks/evidence.py --page                    # write the table of docs/reproducing.md from the list

The list is evidence.toml. Commands run from the root of the repository, each in a process of its own with its output in
OUT/<name>.log. They find the data by the environment variable ATAS_DATA. When the time is up, or after Ctrl-C, the
running commands get an interrupt: `atas` saves its progress, and the same command continues there. Use --whole on a
machine whose files are lost afterwards.

With --jobs several commands share the machine, which keeps a GPU busy while some of them compile or load data. Commands
marked `timed` report seconds of training, so they run alone. The others are expected to take longer by the number of
jobs.

After every command a line of JSON with name, status, seconds and commit is added to OUT/evidence.jsonl. A command is
finished once it has ended with status 0. A command that failed does not stop the others; the next call tries it again,
after those that were not tried yet.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from atas._utils.environment import commit

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reproducing.md"
LIST = ROOT / "benchmarks" / "evidence.toml"
HEAD = "| name | what it shows | command | seconds | result |\n|---|---|---|---:|---|\n"
GRACE = 25.0  # seconds that an interrupted command has to save its progress
POLL = 0.05  # seconds between two looks at the running commands
STARTUP = 60.0  # with less time left than this, a long command would hardly begin
NOT_RUN, FINISHED, FAILED, STOPPED, KILLED = "not run", "finished", "failed", "stopped", "killed"


@dataclass(frozen=True)
class Item:
    """A command of the list: its estimated seconds, the file it ends in, what it shows, and whether its time counts."""

    name: str
    why: str
    command: str
    seconds: int
    result: str
    resumes: bool = True
    timed: bool = False

    @property
    def words(self) -> list[str]:
        """The command as a list, run by this Python."""
        program, *words = shlex.split(self.command)
        return [sys.executable, *(["-m", "atas"] if program == "atas" else []), *words]

    def fits(self, seconds: float, *, whole: bool) -> bool:
        """Return whether to start with this many seconds left."""
        resumes = self.resumes and not whole
        return seconds >= (min(self.seconds, STARTUP) if resumes else self.seconds)


def read(path: Path) -> list[Item]:
    """Return the list in order of priority."""
    items = [Item(**entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))["commands"]]
    names = [item.name for item in items]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise SystemExit(f"evidence.py: {path} has several commands called {', '.join(sorted(repeated))}")
    return items


def table(items: Sequence[Item]) -> str:
    """Return the list as a table in Markdown."""
    rows = [f"| `{i.name}` | {i.why} | `{i.command}` | {i.seconds:,} | `{i.result}` |\n" for i in items]
    return HEAD + "".join(rows)


def write_page(items: Sequence[Item]) -> None:
    """Replace the table in docs/reproducing.md."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(HEAD)
    after = rest[rest.index("\n\n") + 1 :]
    PAGE.write_text(before + table(items) + after, encoding="utf-8")


class History:
    """How every command ended, in OUT/evidence.jsonl. A command whose words have changed since counts as not run."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "evidence.jsonl"
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        self._last = {(row["name"], row["command"]): row["status"] for row in map(json.loads, lines)}

    def status(self, item: Item) -> str:
        """Return how the command ended the last time."""
        return str(self._last.get((item.name, item.command), NOT_RUN))

    def add(self, item: Item, status: str, seconds: float) -> None:
        """Record how a command ended."""
        self._last[item.name, item.command] = status
        row = {"name": item.name, "status": status, "seconds": round(seconds, 1), "commit": commit()}
        row |= {"date": datetime.now(UTC).isoformat(timespec="seconds"), "command": item.command}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def unfinished(self, items: Sequence[Item]) -> list[Item]:
        """Return what is left to run: in order, with what failed last."""
        left = [item for item in items if self.status(item) != FINISHED]
        return sorted(left, key=lambda item: self.status(item) == FAILED)


class Job:
    """A command that runs, with its output in a file."""

    def __init__(self, item: Item, log: Path) -> None:
        self.item, self.log, self._began = item, log, time.monotonic()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                item.words,
                cwd=ROOT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C reaches this program alone, which passes it on once
            )

    @property
    def seconds(self) -> float:
        """How long it has been running."""
        return time.monotonic() - self._began

    def ended(self) -> str | None:
        """Return how the command ended; None while it runs."""
        status = self._process.poll()
        return None if status is None else FAILED if status else FINISHED

    def interrupt(self) -> None:
        """Ask the command to save its progress and stop."""
        self._process.send_signal(signal.SIGINT)

    def stopped(self, deadline: float) -> str:
        """Return how an interrupted command ended; kill it with what it started if it runs on after the deadline."""
        try:
            return STOPPED if self._process.wait(max(0.0, deadline - time.monotonic())) else FINISHED
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            return KILLED


class Driver:
    """Runs commands, several at a time, until all have ended or the time is up."""

    def __init__(self, out: Path, *, seconds: float, whole: bool, jobs: int) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._out, self._whole, self._most = out, whole, jobs
        self._deadline = time.monotonic() + seconds - GRACE
        self._history, self._running = History(out), list[Job]()
        self._failed: list[str] = []

    def run(self, items: Sequence[Item]) -> int:
        """Run what is not finished; return the exit status."""
        waiting, stopped_by_user = self._history.unfinished(items), False
        try:
            while waiting or self._running:
                self._start(waiting)
                self._end()
                if not self._running and not any(map(self._fits, waiting)):
                    break
                if time.monotonic() > self._deadline:
                    break
                time.sleep(POLL)
        except KeyboardInterrupt:
            stopped_by_user = True
        self._stop()
        rest = self._history.unfinished(items)
        print(
            f"{len(items) - len(rest)} of {len(items)} commands are finished; the same command continues" * bool(rest)
        )
        if self._failed:
            print(f"failed: {', '.join(self._failed)}", file=sys.stderr)
        return 1 if self._failed or stopped_by_user else 0

    def _fits(self, item: Item) -> bool:
        left = self._deadline - time.monotonic()
        return item.fits(left / (1 if item.timed else self._most), whole=self._whole)

    def _start(self, waiting: list[Item]) -> None:
        """Start commands in their order while there is room; one that is timed waits until it is alone."""
        for item in [item for item in waiting if self._fits(item)]:
            must_wait = self._running and (item.timed or any(job.item.timed for job in self._running))
            if must_wait or len(self._running) == self._most:
                return
            waiting.remove(item)
            log = self._out / f"{item.name}.log"
            print(f"{_clock()} {item.name}: started, about {item.seconds:,} s; output in {log}", flush=True)
            self._running.append(Job(item, log))

    def _end(self) -> None:
        for job in list(self._running):
            if status := job.ended():
                self._record(job, status)

    def _stop(self) -> None:
        """Interrupt what runs, and wait until it has saved its progress."""
        for job in self._running:
            job.interrupt()
        deadline = time.monotonic() + GRACE
        for job in list(self._running):
            self._record(job, job.stopped(deadline))

    def _record(self, job: Job, status: str) -> None:
        self._running.remove(job)
        self._history.add(job.item, status, job.seconds)
        took = f"{status} after {job.seconds:.0f} s{_why(status, job.log)}"
        print(f"{_clock()} {job.item.name}: {took}", flush=True)
        self._failed += [job.item.name] if status == FAILED else []


def _clock() -> str:
    return time.strftime("%H:%M:%S")


def _why(status: str, log: Path) -> str:
    """Return the last line of the output of a command that failed."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if status == FAILED else []
    return next((f": {line.strip()}" for line in reversed(lines) if line.strip()), "")


def main() -> int:
    """Run the list, or show it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", type=Path, default=LIST, help="TOML file of commands")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "evidence", help="folder of logs and statuses")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop within this time")
    parser.add_argument("--whole", action="store_true", help="start only commands that are expected to end in time")
    parser.add_argument("--jobs", type=int, default=1, help="run so many commands at a time")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these alone; patterns are allowed")
    parser.add_argument("--dry-run", action="store_true", help="show the list and run nothing")
    parser.add_argument("--page", action="store_true", help="write the table of docs/reproducing.md and run nothing")
    chosen = parser.parse_args()
    items = read(chosen.list)
    if chosen.page:
        write_page(items)
        return 0
    for pattern in chosen.only or ():
        if not fnmatch.filter([item.name for item in items], pattern):
            parser.error(f"no command is called {pattern}; --dry-run lists them")
    items = [item for item in items if any(fnmatch.fnmatch(item.name, name) for name in chosen.only or ["*"])]
    if chosen.dry_run:
        history = History(chosen.out)
        for item in items:
            print(f"{history.status(item):8} {item.seconds:7,} s  {item.name}: {item.command}")
        left = sum(item.seconds for item in history.unfinished(items))
        print(f"{len(history.unfinished(items))} of {len(items)} commands to run, about {left / 3600:.1f} h")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a machine that shuts down saves progress, too
    driver = Driver(chosen.out, seconds=60 * chosen.minutes, whole=chosen.whole, jobs=max(1, chosen.jobs))
    return driver.run(items)


if __name__ == "__main__":
    sys.exit(main())
