"""What a measurement depends on besides the code: versions and hardware."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from typing import Any

import torch

from atas._version import __version__


def describe(device: torch.device) -> dict[str, Any]:
    """Versions, hardware and time, for the files that carry a number."""
    found: dict[str, Any] = {
        "atas": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(device),
        "threads": torch.get_num_threads(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if device.type == "cuda":
        found |= {
            "device_name": torch.cuda.get_device_name(device),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return found
