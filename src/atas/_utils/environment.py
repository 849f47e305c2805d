"""What a measurement depends on besides the code: command, versions, commit and hardware."""

from __future__ import annotations

import functools
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from atas import __version__

if TYPE_CHECKING:
    import torch


class Environment(TypedDict, total=False):
    """Keys of an environment in files; earlier versions wrote fewer."""

    command: str
    atas: str
    commit: str | None
    torch: str
    python: str
    device: str
    cuda: str | None
    date: str
    engine: str
    precision: str


def environment_info(device: torch.device) -> dict[str, Any]:
    """Command, versions, hardware and time as plain values, for the files that carry a number."""
    import torch  # programs that only ask for the commit start without it

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


_SECONDS = 10


@functools.cache
def commit() -> str | None:
    """Return the commit that this package was loaded from, or None outside of its own checkout.

    For a copy without its history, the environment variable ATAS_COMMIT gives the commit.
    """
    return os.environ.get("ATAS_COMMIT") or commit_of(Path(__file__).resolve().parents[1])


def commit_of(package: Path) -> str | None:
    """Return the commit of the checkout that a package folder is part of, with "+" where its files have changed."""
    # A package that is installed inside someone else's checkout is not part of it.
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    head = _git(package, "rev-parse", "HEAD")
    if not head:
        return None
    changed = _git(package, "status", "--porcelain", "--untracked-files=no", "--", ".")
    return head + ("+" if changed else "")


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints, or None where it fails or is not there."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
