"""The perturbed images of an evaluation: kept while it runs, and written to a file at its end."""

from __future__ import annotations

import glob
import os
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from atas import __version__
from atas._utils.files import check_output_path, write_atomically
from atas._utils.formatting import describe_failure
from atas.errors import UsageError

if TYPE_CHECKING:
    from atas.evaluation.result import Evaluation

ENDINGS = (".npz", ".safetensors")
_STAGES, _EVALUATION = "stages", "evaluation"  # keys of a file of saved points
_POINTS = "{}.points-{}-{}.safetensors"
_KIND = "atas-perturbed-images-1"
_VERDICTS = "correct.clean"


@dataclass(frozen=True)
class KeptPoints:
    """The point of each example under an attack: adversarial, or the strongest that failed."""

    points: Tensor
    """Images (N, C, H, W), on the device of the attack."""
    margins: Tensor
    """How far each point is from success (N,), on the CPU; -inf where the attack succeeded."""

    def update(self, rows: Tensor, points: Tensor, margins: Tensor) -> None:
        """Keep those of the points that are stronger; two of them may be of one example."""
        strongest: dict[int, int] = {}
        for position in margins.argsort(descending=True).tolist():
            if not margins[position] >= self.margins[row := int(rows[position])]:
                strongest[row] = position
        if strongest:
            stronger, positions = torch.tensor(list(strongest.items())).T
            self.points[stronger.to(self.points.device)] = points[positions.to(points.device)]
            self.margins[stronger] = margins[positions]


class PointStore:
    """The points of attacks on chunks, in files beside the progress file; without a path nothing is stored.

    A file is replaced when another stage of the attack is complete. It is bound to the fingerprint of its evaluation.
    The caller checks what it reads: the points must give the verdicts of these stages.
    """

    def __init__(self, progress_file: Path | None, fingerprint: str, log: Callable[[str], None]) -> None:
        self._progress_file, self._fingerprint, self._log = progress_file, fingerprint, log
        self.paths: list[Path] = []
        """The files that this evaluation wrote or read."""

    def _path(self, chunk: int, attack: int) -> Path | None:
        file = self._progress_file
        return None if file is None else file.with_name(_POINTS.format(_base(file), chunk, attack))

    def load(self, chunk: int, attack: int, stages: int) -> KeptPoints | None:
        """Return the points and margins after this number of stages; None if there are none."""
        path = self._path(chunk, attack)
        if path is None or not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                if file.metadata() != self._metadata(stages):
                    return None
                points, margins = file.get_tensor("points"), file.get_tensor("margins")
        except (OSError, SafetensorError):
            return None
        self.paths.append(path)
        return KeptPoints(points, margins)

    def save(self, chunk: int, attack: int, stages: int, kept: KeptPoints) -> None:
        """Write the points and margins after this number of stages. Log an error of the disk and continue."""
        path = self._path(chunk, attack)
        if path is None:
            return
        tensors = {"points": kept.points.cpu().contiguous(), "margins": kept.margins}
        try:
            write_atomically(path, lambda temporary: save_file(tensors, temporary, self._metadata(stages)))
            self.paths.append(path)
        except (OSError, SafetensorError) as error:
            self._log(
                f"cannot save the perturbed images in {path} ({describe_failure(error)}); continuing without saving"
            )

    def _metadata(self, stages: int) -> dict[str, str]:
        return {_STAGES: str(stages), _EVALUATION: self._fingerprint}


def saved_points(progress_file: Path) -> list[Path]:
    """Return the files of points beside a progress file, including those of earlier evaluations."""
    found = progress_file.parent.glob(_POINTS.format(glob.escape(_base(progress_file)), "*", "*"))
    return [path for path in found if _holds(path, _STAGES)]


def _base(progress_file: Path) -> str:
    return progress_file.name.removesuffix(".json")  # each of several processes appends a suffix


def check_replaceable(path: Path) -> None:
    """Raise UsageError if the path holds something else than perturbed images, which must not be lost."""
    if path.exists() and not _holds_adversarial(path):
        raise UsageError(f"the perturbed images would replace {path}, which holds something else: give another name")


def _holds_adversarial(path: Path) -> bool:
    if path.suffix.lower() != ".npz":
        return _holds(path, _KIND)
    try:
        with zipfile.ZipFile(path) as archive:
            return f"{_VERDICTS}.npy" in archive.namelist()
    except (ValueError, zipfile.BadZipFile):
        return False


def _holds(path: Path, key: str) -> bool:
    """Return whether a file is a safetensors file with this key in its metadata."""
    try:
        with safe_open(path, framework="pt") as file:
            return key in (file.metadata() or {})
    except (OSError, SafetensorError, ValueError):
        return False


def save_adversarial(result: Evaluation, path: str | os.PathLike[str]) -> None:
    """Write perturbed images, labels and verdicts to a file, .npz or .safetensors.

    The arrays are `labels`, `x_adv.<attack>` and `correct.<attack>`, and `correct.clean`.
    """
    path = Path(path)
    check_output_path(path, "the file of perturbed images", *ENDINGS)
    check_replaceable(path)
    if result.labels is None:
        raise UsageError("the evaluation kept no perturbed images: pass keep=True to atas.evaluate")
    tensors = {"labels": result.labels, _VERDICTS: result.correct["clean"]}
    for name, points in result.adversarial.items():
        tensors |= {f"x_adv.{name}": points, f"correct.{name}": result.correct[name]}

    def write(temporary: Path) -> None:
        if path.suffix.lower() == ".safetensors":
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary, {_KIND: __version__})
            return
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        with temporary.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]

    write_atomically(path, write)
