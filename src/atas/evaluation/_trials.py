"""Whether cuDNN tries its algorithms out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def trials(wanted: bool) -> Iterator[None]:
    """Have cuDNN try all its algorithms for each new number of images, which takes seconds, or take the likely best."""
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, wanted
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
