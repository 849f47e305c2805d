"""`atas.load`: a trained model from a file or a run's folder."""

from __future__ import annotations

import os
from pathlib import Path

from torch import nn

from atas.errors import DataError, UsageError
from atas.training import Run
from atas.training.weights import load_weights, read_weights


def load(path: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """A trained model on the CPU, in eval mode; it takes pixels in [0, 1] and normalises them inside.

    `path` is a file that `atas export --to safetensors` or a training wrote, or the folder of a run. Where the network
    is code of your own, build it and pass it as `model`: a file is never a reason to import or run anything.

    >>> model = load("runs/mine/export/safetensors/model.safetensors")  # doctest: +SKIP
    """
    if not isinstance(path, (str, os.PathLike)):
        raise UsageError(f"the path of a model is text or a Path; got {type(path).__name__}")
    place = Path(path)
    if place.is_dir():
        return Run.load(place, model=model).model
    if not place.exists():
        raise DataError(f"there is no file or run {place}; give a .safetensors file or the folder of a run")
    if model is None:
        _refuse_what_needs_code(place)
    return load_weights(place, model)


def _refuse_what_needs_code(path: Path) -> None:
    about, _ = read_weights(path)
    name = about.get("name")
    if name is None:
        raise UsageError(
            f"{path} does not say which model its weights are of, so another program wrote it; pass the model too: "
            f"atas.load(path, model=...)"
        )
    if ":" in str(name):
        network = str(name).removeprefix("given:")
        raise UsageError(
            f"the network of {path} is code of its own ({network}, {about.get('num_classes')} classes, images of shape "
            f"{about.get('shape')}), which does not travel with the weights; build it and pass it: "
            f"atas.load(path, model=...)"
        )
