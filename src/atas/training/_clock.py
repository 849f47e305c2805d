"""Time spent on a device."""

from __future__ import annotations

import time

import torch


class Clock:
    """Seconds spent in training steps, with the device's work included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started: float | None = None

    def start(self) -> None:
        """Begin, when the device has nothing left to do."""
        self._wait()
        self._started = time.perf_counter()

    def stop(self) -> float:
        """The seconds since the start, when the device has done all that was asked."""
        self._wait()
        elapsed, self._started = self.so_far(), None
        return elapsed

    def so_far(self) -> float:
        """The seconds since the start, without waiting."""
        return 0.0 if self._started is None else time.perf_counter() - self._started

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
