"""What a measurement was made with."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from typing import Any

import torch

from atas._version import __version__


def environment(device: torch.device) -> dict[str, Any]:
    """Software versions, hardware and date, as plain JSON values."""
    return {
        "atas": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(device),
        "cuda": torch.version.cuda,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _processor(device: torch.device) -> str:
    return f"{device.type} ({platform.processor() or platform.machine()})"
