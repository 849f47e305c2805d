"""Worker processes: started together, given tasks one by one, ended together."""

from __future__ import annotations

import atexit
import mmap
import multiprocessing
import os
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import numpy.typing as npt

from atas._utils.system import available_cpus
from atas.errors import AtasError, UsageError

_JOIN_SECONDS = 10.0  # seconds in which a process whose pipe has ended is expected to be gone


def num_workers(workers: int | None) -> int:
    """So many processes as are asked for, or one a processor."""
    if workers is not None and workers < 1:
        raise UsageError(f"workers must be at least 1; got {workers}")
    return workers or available_cpus()


def shared_array(shape: tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray:
    """Zeros that worker processes started later read and write too. They do not count against /dev/shm, which is small
    in containers."""
    count = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(mmap.mmap(-1, max(1, count * np.dtype(dtype).itemsize)), dtype, count).reshape(shape)


class WorkerPool:
    """Processes that each run `work` on the tasks that they are sent.

    They are forked, so they see what `work` refers to without a copy; they use no thread and no device. An error in one
    of them, or its death, is raised here, and they end with this process, however that ends.
    """

    def __init__(self, work: Callable[[Any], Any], workers: int, task_name: str) -> None:
        self._task_name = task_name
        self._pipes: list[Connection] = []
        self._processes = []
        context = multiprocessing.get_context("fork")
        atexit.register(self.close)  # runs before multiprocessing waits for its children
        for _ in range(workers):
            ours, theirs = context.Pipe()
            self._pipes.append(ours)
            process = context.Process(target=_worker_loop, args=(work, theirs, list(self._pipes)), daemon=True)
            with warnings.catch_warnings(), _block_signals():
                warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
                process.start()
            theirs.close()
            self._processes.append(process)

    def __len__(self) -> int:
        return len(self._pipes)

    def submit(self, worker: int, task: Any) -> None:
        """Give a worker a task; it takes them in this order."""
        try:
            self._pipes[worker].send(task)
        except OSError as error:
            raise self._worker_died(worker) from error

    def results(self, timeout: float | None = None) -> list[tuple[int, Any]]:
        """Wait for answers: pairs of a worker and what `work` returned; none after `timeout` seconds."""
        found = []
        for pipe in wait(self._pipes, timeout):
            worker = self._pipes.index(pipe)  # type: ignore[arg-type]
            try:
                answer = self._pipes[worker].recv()
            except (EOFError, OSError) as error:
                raise self._worker_died(worker) from error
            if isinstance(answer, Exception):
                raise answer
            found.append((worker, answer))
        return found

    def _worker_died(self, worker: int) -> AtasError:
        process = self._processes[worker]
        process.join(_JOIN_SECONDS)
        code = process.exitcode or 0
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        cause = {
            -signal.SIGKILL: "probably memory ran out: use fewer workers",
            -signal.SIGBUS: "probably a file under it was cut or its disk failed: check the data",
        }.get(code, "look for its cause above and run the command again")
        return AtasError(f"a process that {self._task_name} {how}; {cause}")

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        atexit.unregister(self.close)
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes = [], []


@contextmanager
def _block_signals() -> Iterator[None]:
    """Processes that are forked inside do not hear Ctrl-C and termination, which go to all processes of a terminal or
    a job: their parent decides when to stop, and may want one more batch."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def imap_unordered(
    work: Callable[[Any], Any], tasks: Sequence[Any], workers: int, task_name: str, poll_interval: float | None = None
) -> Iterator[Any]:
    """The answers to tasks as they come, each done by the next worker that is free; None whenever `poll_interval`
    seconds bring no answer."""
    left = list(reversed(tasks))
    pool = WorkerPool(work, min(workers, len(tasks)), task_name)
    try:
        for worker in range(len(pool)):
            pool.submit(worker, left.pop())
        unanswered = len(tasks)
        while unanswered:
            found = pool.results(poll_interval)
            for worker, _ in found:
                if left:
                    pool.submit(worker, left.pop())
            unanswered -= len(found)
            yield from [answer for _, answer in found] or [None]
    finally:
        pool.close()


def _worker_loop(work: Callable[[Any], Any], tasks: Connection, inherited: list[Connection]) -> None:
    for pipe in inherited:  # or the end of the parent would not end the pipes that it holds
        pipe.close()
    warnings.simplefilter("ignore")  # decoders warn of oddities that do no harm
    try:
        while True:
            tasks.send(_run_task(work, tasks.recv()))
    except (EOFError, OSError):  # the parent is gone
        pass
    finally:
        os._exit(0)  # an orderly exit would flush streams whose locks a thread of the parent may have held at the fork


def _run_task(work: Callable[[Any], Any], task: Any) -> Any:
    try:
        return work(task)
    except AtasError as error:
        return error
    except Exception:
        return RuntimeError(f"in a worker process:\n{traceback.format_exc()}")
