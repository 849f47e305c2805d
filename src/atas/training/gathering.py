"""The tensors of a checkpoint, between several processes and the one that writes and reads it.

A checkpoint does not tell how many processes made it: rows of examples lie in the order of the training set. They are
sent shard by shard; the rest is the same everywhere but the totals of an epoch, which add up.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from atas.parts import Part
from atas.processes import Processes

_TOTALS = "totals."


def _dealt(name: str, axes: int) -> bool:
    """Whether a tensor has a row for every example or place in a batch: all of a method that has rows."""
    return name.startswith("method.") and axes > 0


def gather(tensors: dict[str, Tensor], part: Part, peers: Processes) -> dict[str, Tensor]:
    """The tensors of the whole training, in the first process; nothing in the others."""
    if peers.alone:
        return tensors
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu()
        if name.startswith(_TOTALS):
            tensor = peers.add_up(tensor.clone())
        elif _dealt(name, tensor.dim()):
            tensor = _collect(tensor, part, peers)
        if peers.first:
            found[name] = tensor
    return found


def scatter(tensors: dict[str, Tensor], part: Part, peers: Processes) -> dict[str, Tensor]:
    """What this process needs of the tensors that the first one has."""
    if peers.alone:
        return tensors
    about = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    found: dict[str, Tensor] = {}
    for name, (shape, dtype) in peers.by_first(lambda: about).items():
        if _dealt(name, len(shape)):
            found[name] = _deal(tensors.get(name), shape, dtype, part, peers)
            continue
        tensor = tensors[name].contiguous() if peers.first else torch.empty(shape, dtype=dtype)
        _tell(tensor)
        found[name] = torch.zeros_like(tensor) if name.startswith(_TOTALS) and not peers.first else tensor
    return found


def of_all(rows: Tensor, part: Part, peers: Processes) -> Tensor:
    """The rows of the whole training set, in the first process; those of their own in the others."""
    if peers.alone:
        return rows
    whole = _collect(rows.detach().cpu(), part, peers)
    return whole if peers.first else rows


def share_weights(tensors: list[Tensor], peers: Processes) -> None:
    """Every process has the tensors of the first."""
    if peers.alone:
        return
    for tensor in tensors:
        on_host = tensor.detach().cpu().contiguous()
        _tell(on_host)
        tensor.detach().copy_(on_host)


def _collect(rows: Tensor, part: Part, peers: Processes) -> Tensor:
    count = int(peers.add_up(torch.tensor(len(rows))))
    whole = torch.empty(count if peers.first else 0, *rows.shape[1:], dtype=rows.dtype)
    for shard, owner in _owners(part, peers):
        if owner == peers.rank:
            piece = rows[shard - part.first :: part.held].contiguous()
            if not peers.first:
                dist.send(_raw(piece), 0)
        elif peers.first:
            piece = torch.empty_like(whole[shard :: part.shards], memory_format=torch.contiguous_format)
            dist.recv(_raw(piece), owner)
        if peers.first:
            whole[shard :: part.shards] = piece
    return whole


def _deal(whole: Tensor | None, shape: torch.Size, dtype: torch.dtype, part: Part, peers: Processes) -> Tensor:
    rows = torch.empty(part.share(shape[0]), *shape[1:], dtype=dtype)
    for shard, owner in _owners(part, peers):
        if peers.first:
            assert whole is not None
            piece = whole[shard :: part.shards].contiguous()
            if owner != peers.rank:
                dist.send(_raw(piece), owner)
        elif owner == peers.rank:
            piece = torch.empty_like(rows[shard - part.first :: part.held], memory_format=torch.contiguous_format)
            dist.recv(_raw(piece), 0)
        if owner == peers.rank:
            rows[shard - part.first :: part.held] = piece
    return rows


def _tell(tensor: Tensor) -> None:
    """Every process has what the first one has in this tensor."""
    if tensor.numel():
        dist.broadcast(_raw(tensor), 0)


def _owners(part: Part, peers: Processes) -> list[tuple[int, int]]:
    """Every shard and the process that has it."""
    parts = [Part.of(part.examples, part.shards, rank, peers.count) for rank in range(peers.count)]
    return [(shard, rank) for rank, of in enumerate(parts) for shard in range(of.first, of.first + of.held)]


def _raw(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, in place: every backend takes them, whatever they mean."""
    return tensor.view(-1).view(torch.uint8)
