"""A pool of forked worker processes."""

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

_JOIN_SECONDS = 10.0  # to wait for a process whose pipe has closed


def num_workers(workers: int | None) -> int:
    """Return the number of workers, by default one per processor."""
    if workers is not None and workers < 1:
        raise UsageError(f"workers must be at least 1; got {workers}")
    return workers or available_cpus()


def shared_array(shape: tuple[int, ...], dtype: npt.DTypeLike) -> np.ndarray:
    """Return an array of zeros that workers forked later share.

    It does not use /dev/shm, which is small in containers.
    """
    count = int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(mmap.mmap(-1, max(1, count * np.dtype(dtype).itemsize)), dtype, count).reshape(shape)


class WorkerPool:
    """Processes that run `work` on submitted tasks.

    They are forked, so `work` may refer to any object without a copy; they must not use threads or devices. An error in
    a worker, or its death, is raised in this process. Workers end with this process, even if it is killed.
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
                warnings.simplefilter("ignore", DeprecationWarning)  # about forks in a process with threads
                process.start()
            theirs.close()
            self._processes.append(process)

    def __len__(self) -> int:
        return len(self._pipes)

    def submit(self, worker: int, task: Any) -> None:
        """Send a task to a worker, which runs its tasks in order."""
        try:
            self._pipes[worker].send(task)
        except OSError as error:
            raise self._worker_died(worker) from error

    def results(self, timeout: float | None = None) -> list[tuple[int, Any]]:
        """Wait for results and return pairs of a worker and a result; none after `timeout` seconds."""
        results = []
        for pipe in wait(self._pipes, timeout):
            worker = self._pipes.index(pipe)  # type: ignore[arg-type]
            try:
                answer = self._pipes[worker].recv()
            except (EOFError, OSError) as error:
                raise self._worker_died(worker) from error
            if isinstance(answer, Exception):
                raise answer
            results.append((worker, answer))
        return results

    def _worker_died(self, worker: int) -> AtasError:
        process = self._processes[worker]
        process.join(_JOIN_SECONDS)
        code = process.exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        cause = {
            -signal.SIGKILL: "probably memory ran out: use fewer workers",
            -signal.SIGBUS: "probably a mapped file was truncated or its disk failed: check the data",
        }.get(code, "see the messages above and run the command again")
        return AtasError(f"a process that {self._task_name} {how}; {cause}")

    def close(self) -> None:
        """Kill the processes."""
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
    """Block SIGINT and SIGTERM in processes that are forked inside.

    A terminal or a job scheduler sends them to all processes, but the parent decides when to stop.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def imap_unordered(
    work: Callable[[Any], Any], tasks: Sequence[Any], workers: int, task_name: str, poll_interval: float | None = None
) -> Iterator[Any]:
    """Yield results as they arrive; each task runs in the next free worker.

    None is yielded when no result arrives within `poll_interval` seconds.
    """
    left = list(reversed(tasks))
    pool = WorkerPool(work, min(workers, len(tasks)), task_name)
    try:
        for worker in range(len(pool)):
            pool.submit(worker, left.pop())
        pending = len(tasks)
        while pending:
            results = pool.results(poll_interval)
            for worker, _ in results:
                if left:
                    pool.submit(worker, left.pop())
            pending -= len(results)
            yield from [answer for _, answer in results] or [None]
    finally:
        pool.close()


def _worker_loop(work: Callable[[Any], Any], tasks: Connection, inherited: list[Connection]) -> None:
    for pipe in inherited:  # otherwise the pipes of a dead parent would stay open
        pipe.close()
    warnings.simplefilter("ignore")  # decoders warn about harmless oddities
    try:
        while True:
            tasks.send(_run_task(work, tasks.recv()))
    except (EOFError, OSError):  # the parent is gone
        pass
    finally:
        os._exit(0)  # a normal exit flushes streams whose locks a thread of the parent may have held at the fork


def _run_task(work: Callable[[Any], Any], task: Any) -> Any:
    try:
        return work(task)
    except AtasError as error:
        return error
    except Exception:
        return RuntimeError(f"in a worker process:\n{traceback.format_exc()}")
