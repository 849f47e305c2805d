"""What the name of a data set refers to: a set by name, a file or folder, the Hugging Face hub, or a function."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from atas._utils.imports import GIVEN, is_code
from atas.data.cifar import SPECS
from atas.data.folder import find_test_folder, is_class_folder
from atas.data.hugging_face import MARKERS, PREFIX
from atas.data.official import FILE_SETS, IDX_FILES, find_file
from atas.data.packed import MANIFEST
from atas.errors import DataError, UsageError, unknown

IMAGE_FOLDER, PACKED = "imagefolder", "packed"
FORMS = ("FOLDER", "FILE.npz", "hf:owner/name", "package.module:function")
"""What else than a name `load` accepts, for lists."""
_ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".7z", ".rar")
_FORMATS = (
    "train/<class>/ and test/<class>/ (or val/), a packed set (manifest.json), arrays as .npy files (x_train.npy, "
    "...), the four idx files of MNIST's format, or a data set saved by Hugging Face's save_to_disk"
)


@dataclass(frozen=True)
class Source:
    """Where data comes from. `kind` is a name of `names()`, or npz, npy, idx, saved (by `datasets`), hub or function;
    `path` is the file or folder, if there is one."""

    kind: str
    path: Path | None
    root_given: bool = True


def resolve_root(root: str | os.PathLike[str] | None) -> Path:
    """Return `root`, else the folder in ATAS_DATA, else ./data."""
    return Path(root or os.environ.get("ATAS_DATA") or "data").expanduser()


def names() -> list[str]:
    """Return the names of data sets that `load` accepts, besides the forms in `FORMS`."""
    return ["digits", *SPECS, *FILE_SETS, IMAGE_FOLDER, PACKED]


def find_source(name: str, root: str | os.PathLike[str] | None = None) -> Source:
    """Return what a name refers to; raise UsageError or DataError if that is nothing."""
    if name in names():
        return Source(name, resolve_root(root), root is not None)
    if "\0" in name:
        raise UsageError(f"the name of a data set cannot have a zero byte; got {name!r}")
    given = None if root is None else Path(root).expanduser()
    if name.startswith(PREFIX):
        return Source("hub", given)
    if not is_path(name):
        if is_code(name):
            return Source("function", given)
        if not os.path.isdir(name):  # False also for names that no file can have
            raise unknown("data set", name, names(), see=f"Known: {', '.join(names())}; or {', '.join(FORMS)}")
    path = Path(name).expanduser()
    if given is not None:
        beside = given / path.name
        path = beside if given.is_dir() and beside.exists() else given
    return _recognise(path)


def is_path(name: str) -> bool:
    """Return whether a name looks like the path of a file or folder, which need not exist."""
    if name.startswith((PREFIX, GIVEN)):
        return False
    return "/" in name or os.sep in name or name.startswith((".", "~")) or name.endswith((".npz", ".npy"))


def is_function(name: str) -> bool:
    """Return whether a name is that of a user's own function, as `package.module:function`."""
    return is_code(name) and not name.startswith((PREFIX, GIVEN)) and not is_path(name)


def display_name(name: str, root: str | None = None) -> str:
    """Return a data set's name for titles: that of the folder or file, if it is one.

    >>> display_name("imagefolder", "data/my-photos"), display_name("digits"), display_name("data/cells.npz")
    ('my-photos', 'digits', 'cells')
    >>> display_name("hf:uoft-cs/cifar100?label=fine_label"), display_name("given:noise")
    ('uoft-cs/cifar100', 'noise')
    """
    if name in (IMAGE_FOLDER, PACKED):
        return (Path(root).name or Path(root).resolve().name or name) if root else name
    if is_path(name) or (":" not in name and name not in names()):
        path = Path(name)
        return path.stem if path.suffix in (".npz", ".npy") else path.name or path.resolve().name or name
    return name.removeprefix(GIVEN).removeprefix(PREFIX).partition("?")[0]


def _recognise(path: Path) -> Source:
    """Return the source of a file or folder by its content."""
    if path.suffix == ".npz" and not path.is_dir():
        return Source("npz", path)
    if path.suffix == ".npy" and not path.is_dir():
        return Source("npy", path.parent)
    if not os.path.exists(path):
        raise DataError(f"there is no {path}; pass the path of a folder or of an .npz file.")
    if not path.is_dir():
        raise UsageError(f"{path} is not data that atas reads; {_advice(path)}.")
    if (path / MANIFEST).is_file():
        return Source(PACKED, path)
    if (path / "train").is_dir() and not any((path / marker).is_file() for marker in MARKERS):
        return Source(IMAGE_FOLDER, path)
    if (path / MARKERS[0]).is_file() or (path / MARKERS[1]).is_file():
        return Source("saved", path)
    if all(find_file(path, name) for name in IDX_FILES):
        return Source("idx", path)
    if any(path.glob("*.npy")):
        return Source("npy", path)
    archives = sorted(file.name for file in path.glob("*.npz"))
    if archives:
        raise UsageError(f"{path} holds the file {archives[0]}; pass its path, {path / archives[0]}.")
    if is_class_folder(path) or find_test_folder(path) is not None:
        return Source(IMAGE_FOLDER, path)  # a single split
    raise DataError(f"{path} holds no data that atas reads; it should have {_FORMATS}.")


def _advice(path: Path) -> str:
    if path.suffix.lower() in _ARCHIVES:
        return "unpack it, and pass the folder"
    return "save images and labels as numeric arrays with np.savez, or pass a function package.module:function"
