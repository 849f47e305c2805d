"""The streaming loader: worker processes read images ahead, and each batch is copied to the device before its step.

Workers fill a ring of batches in shared memory, and this process empties it. On CUDA the ring is pinned, and copies run
on their own stream while earlier steps compute. The images of a step are always at the same addresses, so that a CUDA
graph can be replayed.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Unpack

import numpy as np
import torch
from torch import Tensor

from atas.data.lazy_images import InMemoryImages, LazyImages
from atas.data.loader import Loader, LoaderOptions
from atas.data.worker_pool import WorkerPool, num_workers, shared_array

PREFETCH = 4  # batches in the ring


class StreamingLoader(Loader):
    """A loader that reads images from storage shortly before they are needed."""

    kind = "streaming"

    def __init__(
        self,
        images: Tensor | LazyImages,
        labels: Tensor,
        *,
        device: torch.device,
        workers: int | None = None,
        **how: Unpack[LoaderOptions],
    ) -> None:
        size = min(how["batch_size"], len(labels))
        staged = torch.zeros(size, *images.shape[1:], dtype=torch.uint8, device=device)
        super().__init__(staged, labels, **how)
        self._source = images if isinstance(images, LazyImages) else InMemoryImages(images)
        self.workers = min(num_workers(workers), size)
        self._order = shared_array((len(labels),), np.int64)
        self._ring = shared_array((PREFETCH, *staged.shape), np.uint8)
        self._pending = [0] * PREFETCH  # unfinished tasks of each batch in the ring
        self._next_batch = 0  # the next batch to submit
        self._pool: WorkerPool | None = None
        self._copier = _CudaCopy(self._ring, staged) if device.type == "cuda" else _HostCopy(self._ring, staged)

    def start_epoch(self, order: Tensor, first: int) -> None:
        """Start the workers if there are none, and submit the first batches."""
        if self._pool is None:
            self._pool = WorkerPool(self._fill, self.workers, "reads training images")
        while any(self._pending):  # tasks of an abandoned epoch
            self._collect()
        for slot in range(PREFETCH):
            self._copier.wait(slot)
        self._order[:] = order.numpy()
        self._next_batch = first
        for _ in range(PREFETCH - 1):  # one slot stays free, because its batch may still be copied
            self._submit_next()

    def prefetch(self, batch: int) -> None:
        """Wait for the images of a batch and start their copy to the device."""
        while self._pending[batch % PREFETCH]:
            self._collect()
        self._copier.copy(batch % PREFETCH, self.size(batch))
        self._copier.wait((batch - 1) % PREFETCH)
        self._submit_next()

    def rows(self, index: Tensor) -> Tensor:
        """Return 0 to B - 1: the batch is stored in the order of its examples."""
        return torch.arange(len(index), device=index.device)

    def close(self) -> None:
        """End the workers."""
        self._copier.close()
        if self._pool is not None:
            self._pool.close()
        self._pool, self._pending = None, [0] * PREFETCH

    def _submit_next(self) -> None:
        """Divide the next batch among the workers, if there is one."""
        assert self._pool is not None
        if self._next_batch < len(self):
            slot, first = self._next_batch % PREFETCH, self._next_batch * self.batch_size
            ends = np.linspace(0, self.size(self._next_batch), len(self._pool) + 1).astype(int).tolist()
            for worker, (start, end) in enumerate(pairwise(ends)):
                if start < end:
                    self._pool.submit(worker, (slot, first, start, end))
                    self._pending[slot] += 1
            self._next_batch += 1

    def _collect(self) -> None:
        assert self._pool is not None
        for _, slot in self._pool.results():
            self._pending[slot] -= 1

    def _fill(self, task: tuple[int, int, int, int]) -> int:
        """Read images of a batch into their slot of the ring; runs in a worker."""
        slot, first, start, end = task
        self._source.read(self._order[first + start : first + end], self._ring[slot, start:end])
        return slot


class _HostCopy:
    """Synchronous copies on the CPU."""

    def __init__(self, ring: np.ndarray, staged: Tensor) -> None:
        self._ring, self._staged = torch.from_numpy(ring), staged

    def copy(self, slot: int, size: int) -> None:
        """Copy a batch of the ring to the images of the loader."""
        self._staged[:size] = self._ring[slot, :size]

    def wait(self, slot: int) -> None:
        """Wait for the last copy from this slot of the ring."""

    def close(self) -> None:
        """Do nothing."""


class _CudaCopy:
    """Asynchronous copies on a second stream into two alternating buffers, then to the images of the loader.

    The host waits at most for the copy before the last one, so it stays a step ahead of the device.
    """

    def __init__(self, ring: np.ndarray, staged: Tensor) -> None:
        self._ring, self._staged = torch.from_numpy(ring), staged
        self._pinned = False
        self._stream = torch.cuda.Stream(staged.device)
        self._buffers = [torch.empty_like(staged) for _ in range(2)]
        self._free = [torch.cuda.Event() for _ in self._buffers]
        self._arrived = [torch.cuda.Event() for _ in ring]
        self._turn = 0

    def copy(self, slot: int, size: int) -> None:
        """Start the copy of a batch."""
        self._pin()
        turn = self._turn = 1 - self._turn
        main = torch.cuda.current_stream(self._staged.device)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._free[turn])
            self._buffers[turn][:size].copy_(self._ring[slot, :size], non_blocking=True)
            self._arrived[slot].record(self._stream)
        main.wait_event(self._arrived[slot])
        self._staged[:size].copy_(self._buffers[turn][:size])
        self._free[turn].record(main)

    def wait(self, slot: int) -> None:
        """Wait for the last copy from this slot of the ring."""
        self._arrived[slot].synchronize()

    def close(self) -> None:
        """Unpin the ring."""
        if self._pinned:
            torch.cuda.synchronize(self._staged.device)
            torch.cuda.cudart().cudaHostUnregister(self._ring.data_ptr())
            self._pinned = False

    def _pin(self) -> None:
        """Pin the ring in place, after the workers that share it were forked."""
        if not self._pinned:
            with torch.cuda.device(self._staged.device):
                code = torch.cuda.cudart().cudaHostRegister(self._ring.data_ptr(), self._ring.nbytes, 0)
            torch.cuda.check_error(code)
            self._pinned = True
