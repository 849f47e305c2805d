"""The processes that torchrun started: rank, size, device, collectives and lost ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from atas.errors import AtasError, UsageError

T = TypeVar("T")

_TIMEOUT = timedelta(minutes=10)  # how long the others may be busy, with a checkpoint of many gigabytes for example


class LostRankError(AtasError):
    """Another process has ended, or cannot be reached any more."""


@dataclass(frozen=True)
class World:
    """This process, number `rank`, and `size` in all; alone unless told otherwise.

    What these methods do, all processes must do, in the same order.
    """

    rank: int = 0
    size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is the one that writes and speaks for all."""
        return self.rank == 0

    def on_rank0(self, function: Callable[[], T]) -> T:
        """What a function returns in the first process, which alone calls it, or the error that it raises there."""
        if self.size == 1:
            return function()
        answer: list[Any] = [None, None]
        if self.is_main:
            try:
                answer[0] = function()
            except (AtasError, OSError) as error:
                error.on_all_ranks = True  # type: ignore[union-attr]
                answer[1] = error
        dist.broadcast_object_list(answer, device=torch.device("cpu"))
        if answer[1] is not None:
            raise answer[1]
        return answer[0]

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The sum of what each process gives, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def device(self, chosen: torch.device) -> torch.device:
        """The device of this process: on a machine with several GPUs, each has one of its own."""
        if chosen.type != "cuda" or self.size == 1:
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
    def local_size(self) -> int:
        """How many of the processes are on this machine."""
        return 1 if self.size == 1 else int(os.environ.get("LOCAL_WORLD_SIZE", self.size))

    @contextmanager
    def comm_errors(self, remedy: str) -> Iterator[None]:
        """Inside, an error of communication is one sentence that ends with the remedy."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or isinstance(error, AtasError) or not _is_communication_error(error):
                raise
            raise LostRankError(
                f"process {self.rank} of {self.size} cannot reach another, which has ended or hangs; {remedy}"
            ) from error


SINGLE = World()


class AnyFlag:
    """What any process wishes, told to all of them without waiting: the answer to a call comes with the next one, and
    a wish that has just been granted is not made again."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._sent: tuple[Tensor, Any] | None = None

    def __call__(self, *wishes: bool) -> list[bool]:
        """Make wishes, and learn which of the last call's are granted; alone, those of this one."""
        if self._world.size == 1:
            return list(wishes)
        granted = [False] * len(wishes)
        if self._sent is not None:
            told, work = self._sent
            work.wait()
            granted = told.bool().tolist()
        told = torch.tensor([wish and not done for wish, done in zip(wishes, granted, strict=True)], dtype=torch.int32)
        self._sent = told, dist.all_reduce(told, dist.ReduceOp.MAX, async_op=True)
        return granted


def launched_world_size() -> int:
    """How many processes torchrun has started; without it, one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def init() -> Iterator[World]:
    """The processes that torchrun started, or that the caller made a group of; without either there is one.

    A group is ended only where all went well: elsewhere others may never answer again.
    """
    if dist.is_available() and dist.is_initialized():
        yield World(dist.get_rank(), dist.get_world_size())
        return
    count = launched_world_size()
    if count == 1:
        yield World()
        return
    if not dist.is_available():
        raise UsageError("this PyTorch was built without torch.distributed; start one process, without torchrun")
    on_gpu = torch.cuda.is_available() and dist.is_nccl_available()
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=_TIMEOUT)
    except (RuntimeError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise AtasError(
            f"{count} processes are to work together (WORLD_SIZE) but do not find each other ({why}); start them with "
            f"torchrun, and on several machines check its --master-addr and --master-port"
        ) from error
    yield World(dist.get_rank(), count)
    dist.destroy_process_group()


def _is_communication_error(error: RuntimeError) -> bool:
    """Errors of NCCL and of the store have a class of their own, those of gloo only name it."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


@torch.no_grad()
def all_reduce_tensors(tensors: Sequence[Tensor], world: World) -> list[Tensor]:
    """The sum over all processes of each tensor, in float32 at least; all of them travel as one flat tensor."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    flat = world.all_reduce_sum(torch.cat([tensor.to(dtype).flatten() for tensor in tensors]))
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


def select_device(name: str, world: World = SINGLE) -> torch.device:
    """Return the device of that name for this rank; `auto` is the GPU if there is one.

    With several ranks each has a GPU of its own. A GPU with a number becomes the current one, on which streams, graphs
    and kernels are made.
    """
    if name == "auto":
        return world.device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"there is no device '{name}'; use auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"training runs on auto, cpu or cuda, not on '{name}'")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("this machine has no CUDA device, or this PyTorch was built without CUDA; use device cpu")
    if device.type == "cuda" and device.index is not None:
        if device.index >= (count := torch.cuda.device_count()):
            raise UsageError(f"there is no device '{name}'; this machine has cuda:0 to cuda:{count - 1}")
        torch.cuda.set_device(device)
    return world.device(device)
