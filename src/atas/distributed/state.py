"""Checkpoint tensors, gathered from all ranks and scattered to them again.

A checkpoint does not depend on the number of processes: per-example rows lie in the order of the training set. Rows are
sent shard by shard. Everything else is equal on all ranks, except the sums over an epoch, which are added up.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from atas.distributed.sharding import DataShard
from atas.distributed.world import World

_TOTALS = "totals."


def _is_sharded(name: str, axes: int) -> bool:
    """Whether a tensor has a row for every example or place in a batch: all of a method that has rows."""
    return name.startswith("method.") and axes > 0


def gather_state(tensors: dict[str, Tensor], shard: DataShard, world: World) -> dict[str, Tensor]:
    """The tensors of the whole training, in the first process; nothing in the others."""
    if world.size == 1:
        return tensors
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu()
        if name.startswith(_TOTALS):
            tensor = world.all_reduce_sum(tensor.clone())
        elif _is_sharded(name, tensor.dim()):
            tensor = _gather_rows(tensor, shard, world)
        if world.is_main:
            found[name] = tensor
    return found


def scatter_state(tensors: dict[str, Tensor], shard: DataShard, world: World) -> dict[str, Tensor]:
    """What this process needs of the tensors that the first one has."""
    if world.size == 1:
        return tensors
    about = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    found: dict[str, Tensor] = {}
    for name, (shape, dtype) in world.on_rank0(lambda: about).items():
        if _is_sharded(name, len(shape)):
            found[name] = _scatter_rows(tensors.get(name), shape, dtype, shard, world)
            continue
        tensor = tensors[name].contiguous() if world.is_main else torch.empty(shape, dtype=dtype)
        _broadcast_bytes(tensor)
        found[name] = torch.zeros_like(tensor) if name.startswith(_TOTALS) and not world.is_main else tensor
    return found


def gather_rows(rows: Tensor, shard: DataShard, world: World) -> Tensor:
    """The rows of the whole training set, in the first process; those of their own in the others."""
    if world.size == 1:
        return rows
    whole = _gather_rows(rows.detach().cpu(), shard, world)
    return whole if world.is_main else rows


def broadcast_weights(tensors: list[Tensor], world: World) -> None:
    """Every process has the tensors of the first."""
    if world.size == 1:
        return
    for tensor in tensors:
        on_host = tensor.detach().cpu().contiguous()
        _broadcast_bytes(on_host)
        tensor.detach().copy_(on_host)


def _gather_rows(rows: Tensor, shard: DataShard, world: World) -> Tensor:
    count = int(world.all_reduce_sum(torch.tensor(len(rows))))
    whole = torch.empty(count if world.is_main else 0, *rows.shape[1:], dtype=rows.dtype)
    for number, owner in _owners(shard, world):
        if owner == world.rank:
            piece = rows[number - shard.first_shard :: shard.num_held].contiguous()
            if not world.is_main:
                dist.send(_as_bytes(piece), 0)
        elif world.is_main:
            piece = torch.empty_like(whole[number :: shard.shards], memory_format=torch.contiguous_format)
            dist.recv(_as_bytes(piece), owner)
        if world.is_main:
            whole[number :: shard.shards] = piece
    return whole


def _scatter_rows(
    whole: Tensor | None, shape: torch.Size, dtype: torch.dtype, shard: DataShard, world: World
) -> Tensor:
    rows = torch.empty(shard.local_count(shape[0]), *shape[1:], dtype=dtype)
    for number, owner in _owners(shard, world):
        if world.is_main:
            assert whole is not None
            piece = whole[number :: shard.shards].contiguous()
            if owner != world.rank:
                dist.send(_as_bytes(piece), owner)
        elif owner == world.rank:
            piece = torch.empty_like(
                rows[number - shard.first_shard :: shard.num_held], memory_format=torch.contiguous_format
            )
            dist.recv(_as_bytes(piece), 0)
        if owner == world.rank:
            rows[number - shard.first_shard :: shard.num_held] = piece
    return rows


def _broadcast_bytes(tensor: Tensor) -> None:
    """Every process has what the first one has in this tensor."""
    if tensor.numel():
        dist.broadcast(_as_bytes(tensor), 0)


def _owners(shard: DataShard, world: World) -> list[tuple[int, int]]:
    """Every shard and the process that has it."""
    held = [DataShard.for_rank(shard.examples, shard.shards, rank, world.size) for rank in range(world.size)]
    return [
        (number, rank)
        for rank, part in enumerate(held)
        for number in range(part.first_shard, part.first_shard + part.num_held)
    ]


def _as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, in place: every backend takes them, whatever they mean."""
    return tensor.view(-1).view(torch.uint8)
