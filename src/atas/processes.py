"""Processes that work on one thing together, as torchrun starts them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from atas.errors import AtasError, UsageError

T = TypeVar("T")

_PATIENCE = timedelta(minutes=10)  # how long the others may be busy, with a checkpoint of many gigabytes for example


class LostProcess(AtasError):  # noqa: N818  (the error is that of another process)
    """Another process has ended, or cannot be reached any more."""


@dataclass(frozen=True)
class Processes:
    """This process, number `rank`, and `count` in all; alone unless told otherwise.

    What these methods do, all processes must do, in the same order.
    """

    rank: int = 0
    count: int = 1

    @property
    def alone(self) -> bool:
        """Whether there are no others."""
        return self.count == 1

    @property
    def first(self) -> bool:
        """Whether this is the one that writes and speaks for all."""
        return self.rank == 0

    def by_first(self, function: Callable[[], T]) -> T:
        """What a function returns in the first process, which alone calls it, or the error that it raises there."""
        if self.alone:
            return function()
        answer: list[Any] = [None, None]
        if self.first:
            try:
                answer[0] = function()
            except (AtasError, OSError) as error:
                error.everywhere = True  # type: ignore[union-attr]
                answer[1] = error
        dist.broadcast_object_list(answer, device=torch.device("cpu"))
        if answer[1] is not None:
            raise answer[1]
        return answer[0]

    def add_up(self, tensor: Tensor) -> Tensor:
        """The sum of what each process gives, in place."""
        if not self.alone:
            dist.all_reduce(tensor)
        return tensor

    def device(self, chosen: torch.device) -> torch.device:
        """The device of this process: on a machine with several GPUs, each has one of its own."""
        if chosen.type != "cuda" or self.alone:
            return chosen
        place = int(os.environ.get("LOCAL_RANK", self.rank))
        if place >= torch.cuda.device_count():
            raise AtasError(
                f"process {place} of this machine finds no GPU of its own among {torch.cuda.device_count()}; start at "
                f"most so many a machine with --nproc-per-node"
            )
        torch.cuda.set_device(place)
        return torch.device("cuda", place)

    @property
    def here(self) -> int:
        """How many of the processes are on this machine."""
        return 1 if self.alone else int(os.environ.get("LOCAL_WORLD_SIZE", self.count))

    @contextmanager
    def reached(self, remedy: str) -> Iterator[None]:
        """Inside, an error of communication is one sentence that ends with the remedy."""
        try:
            yield
        except RuntimeError as error:
            if self.alone or isinstance(error, AtasError) or not _is_of_communication(error):
                raise
            raise LostProcess(
                f"process {self.rank} of {self.count} cannot reach another, which has ended or hangs; {remedy}"
            ) from error


ALONE = Processes()


class Wishes:
    """What any process wishes, told to all of them without waiting: the answer to a call comes with the next one, and
    a wish that has just been granted is not made again."""

    def __init__(self, peers: Processes) -> None:
        self._peers = peers
        self._sent: tuple[Tensor, Any] | None = None

    def __call__(self, *wishes: bool) -> list[bool]:
        """Make wishes, and learn which of the last call's are granted; alone, those of this one."""
        if self._peers.alone:
            return list(wishes)
        granted = [False] * len(wishes)
        if self._sent is not None:
            told, work = self._sent
            work.wait()
            granted = told.bool().tolist()
        told = torch.tensor([wish and not done for wish, done in zip(wishes, granted, strict=True)], dtype=torch.int32)
        self._sent = told, dist.all_reduce(told, dist.ReduceOp.MAX, async_op=True)
        return granted


def started() -> int:
    """How many processes torchrun has started; without it, one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def launched() -> Iterator[Processes]:
    """The processes that torchrun started, or that the caller made a group of; without either there is one.

    A group is ended only where all went well: elsewhere others may never answer again.
    """
    if dist.is_available() and dist.is_initialized():
        yield Processes(dist.get_rank(), dist.get_world_size())
        return
    count = started()
    if count == 1:
        yield Processes()
        return
    if not dist.is_available():
        raise UsageError("this PyTorch was built without torch.distributed; start one process, without torchrun")
    on_gpu = torch.cuda.is_available() and dist.is_nccl_available()
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=_PATIENCE)
    except (RuntimeError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise AtasError(
            f"{count} processes are to work together (WORLD_SIZE) but do not find each other ({why}); start them with "
            f"torchrun, and on several machines check its --master-addr and --master-port"
        ) from error
    yield Processes(dist.get_rank(), count)
    dist.destroy_process_group()


def _is_of_communication(error: RuntimeError) -> bool:
    """Errors of NCCL and of the store have a class of their own, those of gloo only name it."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)
