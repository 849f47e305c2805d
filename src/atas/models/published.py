"""Trained models by name: those that this project publishes, and those in Hugging Face repositories.

The weights of this project's models are in the folder `weights/` of a clone, not in the installed package. The
environment variable ATAS_WEIGHTS names another folder, or the URL of a mirror, whose files are downloaded once. Files
of published models are compared with the checksums in `published.json`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from importlib.resources import files
from pathlib import Path
from typing import TypedDict

from atas._utils.console import ProgressCallback, no_progress
from atas._utils.download import DownloadError, download
from atas._utils.files import write_atomically
from atas._utils.formatting import first_line
from atas._utils.system import cache_dir
from atas.errors import DataError, UsageError, nearest, unknown

FILE = "model.safetensors"
"""The file of weights in the folder or repository of a model."""
_HUGGING_FACE = "hf:"
_CLONE = Path(__file__).parents[3]


class Published(TypedDict):
    """A published model: the checksum and size of its file, and what it is."""

    sha256: str
    bytes: int
    what: str


@functools.cache
def published() -> dict[str, Published]:
    """Return the published models by name."""
    models: dict[str, Published] = json.loads(files("atas.models").joinpath("published.json").read_text())
    return models


def names() -> list[str]:
    """Return the names of the published models."""
    return list(published())


def is_name(text: str | os.PathLike[str]) -> bool:
    """Return whether a text names a model rather than a file or a folder."""
    return isinstance(text, str) and not Path(text).exists() and (text.startswith(_HUGGING_FACE) or text in published())


def not_found(name: str | os.PathLike[str]) -> DataError:
    """Return the error for a name or path that is neither a file, nor a folder, nor a published model."""
    guess = nearest(os.fspath(name), published())
    meant = "" if guess is None else f" (did you mean '{guess}'?)"
    if published():
        offer = "a name of `atas ls weights`, or hf:owner/name"
    else:
        offer = "or hf:owner/name, or train one with `atas train`: no model is published yet"
    return DataError(
        f"there is no file, run or published model {name}{meant}; pass a .safetensors file, the folder of a run, "
        f"{offer}"
    )


def is_repository(folder: Path) -> bool:
    """Return whether a folder holds weights as `atas export --to hub` writes them, rather than a run."""
    return (folder / FILE).is_file() and not (folder / "recipe.toml").exists()


def locate(name: str, *, progress: ProgressCallback | None = None) -> Path:
    """Return the path of the weights of a published model, or of a Hugging Face repository `hf:owner/name`.

    `hf:owner/name@revision` names a branch, tag or commit. Files are downloaded once.
    """
    if name.startswith(_HUGGING_FACE):
        return _from_hugging_face(name)
    if name not in published():
        raise unknown("published model", name, published())
    source = os.environ.get("ATAS_WEIGHTS") or str(_CLONE / "weights")
    if source.startswith(("http://", "https://")):
        return _from_mirror(name, source, progress)
    path = Path(source).expanduser() / name / FILE
    if not path.exists():
        raise DataError(
            f"the weights of {name} are not in {path.parent}; set ATAS_WEIGHTS to the folder weights/ of a clone of "
            f"atas, or to the URL of a mirror of it"
        )
    _check(name, path)
    return path


def _from_mirror(name: str, mirror: str, progress: ProgressCallback | None) -> Path:
    path = cache_dir() / "weights" / name / FILE
    if path.exists():
        try:
            _check(name, path)
        except DataError:
            pass  # damaged: downloaded again
        else:
            return path
    url = f"{mirror.rstrip('/')}/{name}/{FILE}"

    def fetch(temporary: Path) -> None:
        download(url, temporary, progress or no_progress)
        _check(name, temporary, url)

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, fetch)
    except DownloadError as error:
        raise DataError(f"cannot get the weights of {name}: {error}; set ATAS_WEIGHTS to another mirror") from error
    except OSError as error:
        raise DataError(f"cannot write {path} ({error.strerror}); set ATAS_CACHE to another folder") from error
    return path


def _check(name: str, path: Path, source: str | None = None) -> None:
    """Raise DataError unless the file is the published one."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != published()[name]["sha256"]:
        raise DataError(
            f"{source or path} is not the published {name} (SHA-256 {digest[:12]}..., expected "
            f"{published()[name]['sha256'][:12]}...); get it again"
        )


def _from_hugging_face(name: str) -> Path:
    repository, _, revision = name.removeprefix(_HUGGING_FACE).partition("@")
    if repository.count("/") != 1 or not all(repository.split("/")):
        raise UsageError(f"'{name}' does not name a repository; write hf:owner/name, or hf:owner/name@revision")
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise UsageError(f"{name} needs the package huggingface_hub: pip install 'atas[hub]'") from error
    try:
        return Path(hf_hub_download(repository, FILE, revision=revision or None))
    except Exception as error:  # its errors have many classes: no network, no repository, no such file, no rights
        raise DataError(
            f"cannot get {FILE} from the Hugging Face repository {repository} ({first_line(error)}); check its name, "
            f"the network, and HF_TOKEN if it is private"
        ) from error
