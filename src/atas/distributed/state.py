"""Checkpoint tensors, gathered from all ranks and scattered to them again.

A checkpoint does not depend on the number of processes: per-example rows lie in the order of the training set. The
tensors named in `sharded` have such rows, and are sent rank by rank. Everything else is equal on all ranks, except the
sums over an epoch, which are added up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from atas.distributed.sharding import DataShard
from atas.distributed.world import World

_TOTALS = "totals."


def gather_state(
    tensors: dict[str, Tensor], sharded: Collection[str], shard: DataShard, world: World
) -> dict[str, Tensor]:
    """Return the tensors of the whole training on rank 0, and an empty dict on the others."""
    if world.size == 1:
        return tensors
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu()
        if name.startswith(_TOTALS):
            tensor = world.all_reduce_sum(tensor.clone())
        elif name in sharded:
            tensor = _gather_rows(tensor, shard, world)
        if world.is_main:
            state[name] = tensor
    return state


def scatter_state(
    tensors: dict[str, Tensor], sharded: Collection[str], shard: DataShard, world: World
) -> dict[str, Tensor]:
    """Return this rank's part of the tensors that rank 0 has."""
    if world.size == 1:
        return tensors
    metadata = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    state: dict[str, Tensor] = {}
    for name, (shape, dtype) in world.on_rank0(lambda: metadata).items():
        if name in sharded:
            state[name] = _scatter_rows(tensors.get(name), shape, dtype, shard, world)
            continue
        tensor = tensors[name].contiguous() if world.is_main else torch.empty(shape, dtype=dtype)
        _broadcast_bytes(tensor)
        state[name] = torch.zeros_like(tensor) if name.startswith(_TOTALS) and not world.is_main else tensor
    return state


def gather_rows(rows: Tensor, shard: DataShard, world: World) -> Tensor:
    """Return the rows of the whole training set on rank 0, and a rank's own rows on the others."""
    if world.size == 1:
        return rows
    whole = _gather_rows(rows.detach().cpu(), shard, world)
    return whole if world.is_main else rows


def broadcast_weights(tensors: list[Tensor], world: World) -> None:
    """Copy the tensors of rank 0 to all ranks, in place."""
    if world.size == 1:
        return
    for tensor in tensors:
        on_host = tensor.detach().cpu().contiguous()
        _broadcast_bytes(on_host)
        tensor.detach().copy_(on_host)


def _gather_rows(rows: Tensor, shard: DataShard, world: World) -> Tensor:
    """Return the rows of all ranks in the order of the training set on rank 0, and nothing on the others."""
    count = int(world.all_reduce_sum(torch.tensor(len(rows))))
    if not world.is_main:
        _send(rows.contiguous(), 0)
        return rows[:0]
    whole = torch.empty(count, *rows.shape[1:], dtype=rows.dtype)
    for rank, index in enumerate(_rows_of_ranks(count, shard, world)):
        piece = rows if rank == 0 else torch.empty(len(index), *rows.shape[1:], dtype=rows.dtype)
        if rank:
            _receive(piece, rank)
        whole[index] = piece
    return whole


def _scatter_rows(
    whole: Tensor | None, shape: torch.Size, dtype: torch.dtype, shard: DataShard, world: World
) -> Tensor:
    """Return this rank's rows of a tensor that rank 0 has."""
    if not world.is_main:
        rows = torch.empty(shard.local_count(shape[0]), *shape[1:], dtype=dtype)
        _receive(rows, 0)
        return rows
    assert whole is not None
    own = whole[:0]
    for rank, index in enumerate(_rows_of_ranks(shape[0], shard, world)):
        if rank == 0:
            own = whole[index]
        else:
            _send(whole[index], rank)
    return own


def _rows_of_ranks(count: int, shard: DataShard, world: World) -> Iterator[Tensor]:
    """Yield, for each rank, which of `count` rows it holds."""
    for rank in range(world.size):
        held = DataShard.for_rank(shard.examples, shard.shards, rank, world.size)
        yield held.global_index(torch.arange(held.local_count(count)))


def _send(tensor: Tensor, rank: int) -> None:
    if tensor.numel():
        dist.send(_as_bytes(tensor), rank)


def _receive(tensor: Tensor, rank: int) -> None:
    if tensor.numel():
        dist.recv(_as_bytes(tensor), rank)


def _broadcast_bytes(tensor: Tensor) -> None:
    """Copy a contiguous tensor of rank 0 to all ranks, in place."""
    if tensor.numel():
        dist.broadcast(_as_bytes(tensor), 0)


def _as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as bytes, which every backend can send."""
    return tensor.view(-1).view(torch.uint8)
