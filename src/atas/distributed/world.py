"""The processes that torchrun started: rank, size, device, collectives and lost ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from atas._utils.formatting import first_line
from atas.errors import AtasError, UsageError

T = TypeVar("T")

_TIMEOUT = timedelta(minutes=10)  # a rank may take minutes to write a large checkpoint


class LostRankError(AtasError):
    """Another rank has ended or cannot be reached."""


@dataclass(frozen=True)
class World:
    """This process's rank and the number of processes. By default a single process.

    All ranks must call these methods, in the same order.
    """

    rank: int = 0
    size: int = 1
    cpu_group: Any = None
    """The process group of objects and CPU tensors; None for the default group."""
    in_group: bool = False
    """Whether there is a process group, which may be of one process: then steps communicate as with several."""

    @property
    def is_distributed(self) -> bool:
        """Whether training steps communicate."""
        return self.size > 1 or self.in_group

    @property
    def can_capture(self) -> bool:
        """Whether a CUDA graph can record the communication of a step: NCCL's it can, gloo's it cannot."""
        return not self.is_distributed or "cuda:nccl" in dist.get_backend_config()

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and prints."""
        return self.rank == 0

    def on_rank0(self, function: Callable[[], T]) -> T:
        """Call a function on rank 0 only; return its result, or raise its error, on all ranks."""
        if self.size == 1:
            return function()
        outcome: list[Any] = [None, None]
        if self.is_main:
            try:
                outcome[0] = function()
            except (AtasError, OSError) as error:
                error.on_all_ranks = True  # type: ignore[union-attr]
                outcome[1] = error
        dist.broadcast_object_list(outcome, group=self.cpu_group, device=torch.device("cpu"))
        if outcome[1] is not None:
            raise outcome[1]
        return outcome[0]

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place."""
        if self.is_distributed:
            dist.all_reduce(tensor, group=self.cpu_group if tensor.device.type == "cpu" else None)
        return tensor

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all processes, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.cpu_group)
        return values

    def on_all_ranks(self, function: Callable[[], T]) -> T:
        """Call a function on all ranks and return its result; if it fails on one, raise on all.

        The function must not communicate, as a rank that has failed would not answer.
        """
        result, failure = None, None
        try:
            result = function()
        except Exception as error:
            failure = error
        reasons = self.all_gather(None if failure is None else first_line(failure))
        if failure is not None:
            raise failure
        for rank, reason in enumerate(reasons):
            if reason is not None:
                raise FailedRankError(f"{reason}, on process {rank} of {self.size}")
        return result  # type: ignore[return-value]

    def rows(self, count: int) -> range:
        """Return every `size`-th of `count` rows, from the rank on, so that hard and easy examples are spread evenly.

        >>> World(1, 3).rows(8)
        range(1, 8, 3)
        """
        return range(self.rank, count, self.size)

    def device(self, chosen: torch.device) -> torch.device:
        """Return this rank's device: a GPU for each rank of a machine, the one named or that of the local rank."""
        if self.size == 1:
            return chosen
        if chosen.type == "cuda" and chosen.index is None:
            local_rank = int(os.environ.get("LOCAL_RANK", self.rank))
            chosen = torch.device("cuda", local_rank)
        named = self.all_gather((socket.gethostname(), chosen))
        if chosen.type != "cuda":
            return chosen
        if chosen.index >= torch.cuda.device_count():
            raise AtasError(
                f"process {self.rank} has no GPU: there are {torch.cuda.device_count()} on this machine; start at "
                f"most that many processes per machine with --nproc-per-node"
            )
        if named.count((socket.gethostname(), chosen)) > 1:
            raise UsageError(
                f"several processes would share '{chosen}': set the device to cuda, so that each takes the GPU of its "
                f"rank, and select GPUs by CUDA_VISIBLE_DEVICES"
            )
        return chosen

    @property
    def local_size(self) -> int:
        """Number of ranks on this machine."""
        return 1 if self.size == 1 else int(os.environ.get("LOCAL_WORLD_SIZE", self.size))

    @contextmanager
    def comm_errors(self, remedy: str) -> Iterator[None]:
        """Turn communication errors into a LostRankError that ends with the remedy."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or isinstance(error, AtasError) or not _is_communication_error(error):
                raise
            raise LostRankError(
                f"process {self.rank} of {self.size} cannot reach another, which has ended or hangs; {remedy}"
            ) from error


SINGLE = World()


class FailedRankError(RuntimeError):
    """What all ranks did has failed on another rank."""


class AnyFlag:
    """Asynchronous any-reduce of boolean flags.

    Each call starts an all-reduce of this rank's flags and returns the result of the reduction that the previous call
    started, which has had a whole step to finish. A flag that was just returned as True is not sent again. A single
    process gets its own flags back at once.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._sent: tuple[Tensor, Any] | None = None

    def __call__(self, *flags: bool) -> list[bool]:
        """Send these flags, and return the reduced flags of the last call."""
        if self._world.size == 1:
            return list(flags)
        reduced = [False] * len(flags)
        if self._sent is not None:
            sent, work = self._sent
            work.wait()
            reduced = sent.bool().tolist()
        sent = torch.tensor([flag and not done for flag, done in zip(flags, reduced, strict=True)], dtype=torch.int32)
        self._sent = sent, dist.all_reduce(sent, dist.ReduceOp.MAX, self._world.cpu_group, async_op=True)
        return reduced


def launched_world_size() -> int:
    """Return the number of processes that torchrun started; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def init() -> Iterator[World]:
    """Join the processes that torchrun started, or the caller's process group; otherwise a single process.

    The group is destroyed only if no error occurred, because other ranks may not answer any more after one.
    """
    if dist.is_available() and dist.is_initialized():
        with _cpu_group() as group:
            yield World(dist.get_rank(), dist.get_world_size(), group, in_group=True)
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
    yield World(dist.get_rank(), count, in_group=True)
    dist.destroy_process_group()


@contextmanager
def _cpu_group() -> Iterator[Any]:
    """Make a gloo group where the default group has no backend for the CPU, such as one of NCCL alone."""
    if "cpu:" in dist.get_backend_config():
        yield None
        return
    group = dist.new_group(backend="gloo")
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def _is_communication_error(error: RuntimeError) -> bool:
    """Return whether an error comes from NCCL, gloo or the store. Those of gloo have no class of their own."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


@torch.no_grad()
def all_reduce_tensors(tensors: Sequence[Tensor], world: World) -> list[Tensor]:
    """Sum each tensor over all ranks, in float32 or wider. They are sent as one flat tensor."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    flat = world.all_reduce_sum(torch.cat([tensor.to(dtype).flatten() for tensor in tensors]))
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


def select_device(name: str, world: World = SINGLE) -> torch.device:
    """Return the device of that name for this rank; `auto` is the GPU if there is one.

    With several ranks on a machine each has the GPU of its local rank, and a number is refused. A GPU with a number
    becomes the current one, on which streams, graphs and kernels are made.
    """
    try:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"there is no device '{name}'; use auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"atas does not compute on '{name}'; use auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("this machine has no CUDA device, or this PyTorch was built without CUDA; use device cpu")
    if device.type == "cuda" and device.index is not None and device.index >= (count := torch.cuda.device_count()):
        raise UsageError(f"there is no device '{name}'; this machine has cuda:0 to cuda:{count - 1}")
    device = world.device(device)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device
