"""Run work in a forked process, which may be killed or limited, and classify how it ended.

The parent has everything imported, so a case costs milliseconds.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SAME, SENTENCE = "same", "sentence"  # as without the fault; refused in one sentence
TRACEBACK, CHANGED, LOST, HANG = "traceback", "silent change", "lost file", "hang"
OUTCOMES = (SAME, SENTENCE, TRACEBACK, CHANGED, LOST, HANG)
GOOD = (SAME, SENTENCE)

TIMEOUT = 180.0  # seconds until a case counts as a hang; the slowest takes 10 on an idle core


@dataclass(frozen=True)
class Case:
    """What happened in one case. `name` and the suite's seed repeat it."""

    part: str
    name: str
    outcome: str
    detail: str = ""


@dataclass(frozen=True)
class Answer:
    """How a process ended: exit status (negative for a signal, None for a hang) and what it printed."""

    status: int | None
    out: str
    err: str
    seconds: float

    @property
    def killed(self) -> bool:
        """Whether it was ended by SIGKILL."""
        return self.status == -signal.SIGKILL

    @property
    def fault(self) -> str | None:
        """The bad outcome that the process itself shows, or None."""
        if self.status is None:
            return HANG
        said = self.err + self.out
        if "Traceback (most recent call last)" in said or self.status not in (0, 1, 2):
            return TRACEBACK
        if self.status and not self.err.strip():
            return TRACEBACK  # refused without a sentence
        return None

    @property
    def last_line(self) -> str:
        """The last line of its error output."""
        lines = self.err.strip().splitlines()
        return lines[-1][:300] if lines else f"status {self.status}"


def call(
    work: Callable[[], object],
    *,
    kill_after: float | None = None,
    limits: dict[int, int] | None = None,
    timeout: float = TIMEOUT,
) -> Answer:
    """Call `work` in a process of its own: SIGKILL after `kill_after` seconds, with resource limits."""
    return Process(work, limits=limits).wait(kill_after=kill_after, timeout=timeout)


class Process:
    """A forked process that calls `work`."""

    def __init__(self, work: Callable[[], object], *, limits: dict[int, int] | None = None) -> None:
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self._began = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            self._child(work, limits or {})

    def _child(self, work: Callable[[], object], limits: dict[int, int]) -> None:
        os.setsid()  # a hang is ended with all its workers
        os.dup2(self._out.fileno(), 1)
        os.dup2(self._err.fileno(), 2)
        sys.stdin = open(os.devnull)  # noqa: SIM115  (the process ends soon)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        status = 70
        try:
            for limit, value in limits.items():
                resource.setrlimit(limit, (value, value))
            work()
            status = 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except OSError:
                    status = status or 1
            os._exit(status)

    def wait(self, *, kill_after: float | None = None, timeout: float = TIMEOUT) -> Answer:
        """Wait for the end of the process, or end it."""
        status = None
        while True:
            done, code = os.waitpid(self.pid, os.WNOHANG)
            elapsed = time.monotonic() - self._began
            if done:
                status = os.waitstatus_to_exitcode(code)
                break
            if kill_after is not None and elapsed >= kill_after:
                os.kill(self.pid, signal.SIGKILL)
                kill_after = None
            if elapsed >= timeout:
                os.killpg(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
                break
            time.sleep(0.001)
        texts = []
        for stream in (self._out, self._err):
            stream.seek(0)
            texts.append(stream.read().decode(errors="replace"))
            stream.close()
        return Answer(status, *texts, time.monotonic() - self._began)


def atas(*words: object, cwd: Path | None = None) -> Callable[[], object]:
    """Return a function that runs the command `atas` in this process."""

    def run() -> None:
        from atas import cli

        if cwd is not None:
            os.chdir(cwd)
        sys.argv = ["atas", *map(str, words)]
        cli.main()

    return run


def die_in_write(number: int) -> None:
    """Make this process die just before its `number`-th sync; a file under its temporary name is torn."""
    sync, left = os.fsync, [number]

    def deadly(descriptor: int) -> None:
        left[0] -= 1
        if not left[0]:
            if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".tmp"):
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        sync(descriptor)

    os.fsync = deadly  # type: ignore[assignment]
