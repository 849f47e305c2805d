"""Where the result of a run's evaluation goes: over an earlier one only where it says more."""

from __future__ import annotations

from pathlib import Path

import torch

from atas import data
from atas._files import read_json
from atas.errors import DataError
from atas.evaluation._data import open_source
from atas.evaluation._portions import Reader
from atas.threat import Threat
from atas.training import Run
from atas.training.run import Folder

_AUTOATTACK = "autoattack"  # takes far longer than the others
_OWN_FOLDERS = ("imagefolder", "packed")  # other sets are the same in every folder


def place_of(
    run: Run, root: str | None, test: data.Split, examples: int | None, ball: Threat, attacks: tuple[str, ...]
) -> Path:
    """The run's evaluation, or a file beside it that is named by what is not as there: data, budget, images, attacks.

    `test` is all that is in the folder `root`, of which so many examples are taken. A name that does not begin with
    that of the evaluation is one that `atas export` does not take for the run's own.
    """
    path = Folder(run.folder).evaluation
    if root is not None and _is_other_data(run, root, test):
        path = path.with_name(f"{Path(root).resolve().name}-{path.name}")
    if ball != run.recipe.threat:
        path = path.with_name(f"{path.stem}-{ball.name}-{ball.eps:.4g}.json")
    return _beside_better(path, len(test.labels[:examples]), attacks)


def _is_other_data(run: Run, root: str, test: data.Split) -> bool:
    """Whether the images are not the run's own: by its earlier result, or else by its own folder. Where neither is
    there, they count as moved."""
    wanted = run.recipe.data
    if wanted.name not in _OWN_FOLDERS:
        return False
    if earlier := read_json(Folder(run.folder).evaluation):
        first = test.part(slice(earlier.get("n")))
        return Reader(open_source(first.images, first.labels), torch.float32).digest() != earlier.get("data")
    try:
        own, other = (_fingerprint(wanted.name, folder, wanted.size) for folder in (wanted.root, root))
    except DataError:
        return False
    return own != other


def _fingerprint(name: str, root: str | None, size: int | None) -> str:
    """Of a folder's test images, none of which is decoded."""
    if name == "packed":
        return data.load(name, root).test.fingerprint()
    return data.load(name, root, size=size, lazy=True).test.fingerprint()


def _beside_better(path: Path, n: int, attacks: tuple[str, ...]) -> Path:
    """This path, unless an evaluation on more images, or by AutoAttack, is there: that one stays, and this goes beside
    it."""
    earlier = read_json(path)
    if n < earlier.get("n", 0):
        return path.with_name(f"{path.stem}-{n}.json")
    if _AUTOATTACK in earlier.get("accuracy", ()) and _AUTOATTACK not in attacks:
        return path.with_name(f"{path.stem}-{'-'.join(attacks)}.json")
    return path
