"""TensorBoard: scalars and histograms of every epoch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor


def installed() -> bool:
    """Whether TensorBoard can be written."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError:
        return False
    return True


class TensorBoard:
    """Writes event files into a folder; look at them with `tensorboard --logdir`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def start(self, epoch: int) -> None:
        """A new file, which takes back what earlier ones say of this epoch and later ones."""
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        self._writer = SummaryWriter(str(self._folder), purge_step=epoch)

    def log(self, epoch: int, scalars: Mapping[str, float], histograms: Mapping[str, Tensor]) -> None:
        """Seen at once, not when a buffer is full."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, epoch)
        for name, values in histograms.items():
            self._writer.add_histogram(name, values, epoch)
        self._writer.flush()

    def close(self) -> None:
        """Finish the file."""
        if self._writer is not None:
            self._writer.close()
