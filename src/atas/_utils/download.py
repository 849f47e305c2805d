"""Download a file, with progress."""

from __future__ import annotations

import http.client
import posixpath
import urllib.request
from pathlib import Path

from atas._utils.console import ProgressCallback

TIMEOUT = 10
"""Seconds without data after which a download fails."""
_CHUNK = 1 << 20


class DownloadError(Exception):
    """A source failed; another one may work."""


def download(url: str, path: Path, progress: ProgressCallback | None = None) -> None:
    """Write the content of a URL to a file. Raises DownloadError if it does not arrive whole."""
    what, done = f"downloading {posixpath.basename(url)}", 0
    report: ProgressCallback = progress or (lambda what, done, total: None)
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
