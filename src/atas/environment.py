"""What a measurement depends on besides the code: command, versions and hardware."""

from __future__ import annotations

import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from atas._commit import commit
from atas._version import __version__


def describe(device: torch.device) -> dict[str, Any]:
    """Command, versions, hardware and time as plain values, for the files that carry a number."""
    on_gpu = device.type == "cuda"
    return {
        "command": _command(),
        "atas": __version__,
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if on_gpu else f"{device.type} ({_processor()})",
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda if on_gpu else None,
        "cudnn": torch.backends.cudnn.version() if on_gpu else None,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _command() -> str:
    """What was typed: the program by its name, or as the module that Python was given."""
    name = Path(sys.argv[0]).name
    program = ["python", "-m", "atas"] if name == "__main__.py" else [name]
    return shlex.join([*program, *sys.argv[1:]])


def _processor() -> str:
    return platform.processor() or platform.machine()
