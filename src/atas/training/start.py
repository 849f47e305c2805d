"""The start of a training: random weights, those of a file or run (`model.weights`), or those that timm offers.

The weights are identified by their hash, which the run's recipe keeps beside the path. A run that resumes from a
checkpoint does not need the file any more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atas._utils.formatting import shell_quote
from atas._utils.imports import is_code
from atas.core.fingerprint import state_hash
from atas.errors import DataError, UsageError
from atas.models import published
from atas.models.start import load_start
from atas.models.weights import read_weights
from atas.recipes import Recipe
from atas.training.run import RunFolder, load_recipe

_CONSTANTS = ("mean", "std")  # of the normalisation
_TOLERANCE = 1e-6  # float32 keeps no more of a mean and a std


def identify_weights(recipe: Recipe, run_folder: RunFolder, resume: bool) -> Recipe:
    """Return the recipe with the hash of its weights, and with their mean and std unless it has its own.

    A run to resume keeps what it was started from; its file is read only to see that another recipe means the same.
    """
    config = recipe.model
    if config.weights is None:
        return recipe
    saved = load_recipe(run_folder).model if resume and run_folder.recipe.exists() else None
    started = saved is not None and run_folder.last_checkpoint.exists()
    if started and saved is not None and saved.weights_hash is not None:
        if config.weights_hash == saved.weights_hash:
            return recipe
        if config.weights == saved.weights and not Path(config.weights).exists():
            return _complete(recipe, saved.weights_hash, {key: getattr(saved, key) for key in _CONSTANTS})
    path = weights_file(config.weights)
    metadata, tensors = read_weights(path)
    found = state_hash(tensors)
    if config.weights_hash not in (None, found):
        raise UsageError(
            f"{path} does not hold the weights of the recipe (hash {found}, not {config.weights_hash}): restore the "
            f"file, or remove model.weights_hash to start from what it holds"
        )
    return _complete(recipe, found, _normalization(metadata, tensors))


def _complete(recipe: Recipe, weights_hash: str, constants: dict[str, Any]) -> Recipe:
    own = {
        f"model.{key}": value
        for key, value in constants.items()
        if _takes_constants(recipe) and value is not None and getattr(recipe.model, key) is None
    }
    return recipe.with_values({"model.weights_hash": weights_hash, **own})


def _takes_constants(recipe: Recipe) -> bool:
    """Return whether the recipe's mean and std are those of the model: a user's own has its own."""
    return not is_code(recipe.model.name)  # as is the name of a model that was passed in Python


def weights_file(source: str) -> Path:
    """Return the file of weights that a source means: the file itself, that of a finished run or a published model."""
    if published.is_name(source):
        return published.locate(source)
    path = Path(source)
    if not path.is_dir():
        return path
    run_folder = RunFolder(path)
    if not run_folder.model.exists() and run_folder.recipe.exists():
        raise DataError(
            f"the run {path} in model.weights has not finished; continue it with: atas train --resume --out "
            f"{shell_quote(path)}"
        )
    return run_folder.model


def load_initial_weights(model: nn.Module, recipe: Recipe) -> list[str]:
    """Load the recipe's weights into a new model, in place; return sentences about what differs from them."""
    if recipe.model.weights is None:
        return []
    path = weights_file(recipe.model.weights)
    metadata, tensors = read_weights(path)
    if state_hash(tensors) != recipe.model.weights_hash:
        raise DataError(f"{path} changed while the training was starting; start it again")
    ignored = [f"normalize.{key}" for key in _CONSTANTS] if _takes_constants(recipe) else []
    head = load_start(model, tensors, path, ignored)
    sentences = [] if head is None else [head]
    for key, value in _normalization(metadata, tensors).items() if ignored else ():
        own = model.get_buffer(f"normalize.{key}").flatten()
        if value is not None and not torch.allclose(own, torch.tensor(value).to(own), atol=_TOLERANCE):
            sentences.append(f"model.{key} is the recipe's; the weights were trained with {_as_text(value)}")
    return sentences


def _normalization(metadata: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, tuple[float, ...] | None]:
    """Return mean and std that weights were trained with, as their metadata say or else their tensors."""
    constants: dict[str, tuple[float, ...] | None] = {}
    for key in _CONSTANTS:
        value, tensor = metadata.get(key), tensors.get(f"normalize.{key}")
        if value is None and tensor is not None:
            value = tensor.double().flatten().tolist()
        constants[key] = None if value is None else tuple(value) if isinstance(value, list) else (float(value),)
    return constants


def _as_text(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)
