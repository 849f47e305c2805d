"""Which loader a training set gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import torch

from atas._utils.formatting import format_bytes
from atas._utils.system import host_memory
from atas.data.dataset import Split
from atas.data.lazy_images import LazyImages
from atas.data.loader import DeviceLoader, Loader, LoaderOptions
from atas.data.streaming import StreamingLoader

SHARE = 0.4  # of a device's memory that images may take; the perturbations of a method can take as much again


def open_batches(
    split: Split,
    loading: str,
    *,
    device: torch.device,
    workers: int | None = None,
    say: Callable[[str], object] = print,
    **how: Unpack[LoaderOptions],
) -> Loader:
    """The batches of a training set: `resident`, `streaming`, or for `auto` resident where the images fit the device.

    What was chosen is said where it is not a matter of course.
    """
    images, labels = split.images, split.labels
    size, memory = images.shape.numel(), _memory(device)
    place = images.location if isinstance(images, LazyImages) else "memory"
    resident = loading == "resident" or (loading == "auto" and size <= SHARE * memory)
    about = f"{len(labels):,} training images, {format_bytes(size)} as pixels,"
    if not resident:
        batches = StreamingLoader(images, labels, device=device, workers=workers, **how)
        why = "" if loading == "streaming" else f", as {device.type} has {memory / 1e9:.0f} GB (data.loading = auto)"
        processes = "1 process" if batches.workers == 1 else f"{batches.workers} processes"
        say(f"{about} are streamed from {place} by {processes}{why}")
        return batches
    if isinstance(images, LazyImages):
        say(f"{about} are read from {place} into the memory of {device.type}")
    return DeviceLoader(images, labels, device=device, **how)


def _memory(device: torch.device) -> int:
    """All the memory of a device, in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return host_memory()
