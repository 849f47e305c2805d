"""The weights that a training starts from: random ones, those of a file or run (`model.weights`), or those of timm.

The head is replaced if they were trained for another number of classes. The weights are identified by their hash,
which the run's recipe keeps beside the path. A run that resumes from a checkpoint does not need the file any more.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from atas._utils.formatting import shell_quote
from atas._utils.imports import is_code
from atas.core.fingerprint import state_hash
from atas.core.model_state import state_tensors
from atas.errors import DataError, UsageError, first_few
from atas.models import published
from atas.models.layers import Normalize
from atas.models.timm_network import complete_names
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
    head = load_pretrained(model, tensors, path, ignored)
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


def load_pretrained(
    model: nn.Module, weights: Mapping[str, Tensor], path: Path, ignore: Collection[str] = ()
) -> str | None:
    """Load weights of `path` into a model that will be trained, in place; return a sentence if its head stays random.

    The head is the model's last linear layer or 1x1 convolution: it may have another number of outputs than in the
    file. The constants of a `Normalize` layer may be absent, and so may BatchNorm's count of batches; tensors named
    in `ignore` are left out. Everything else must fit.
    """
    state = state_tensors(model)
    found = {name: value for name, value in complete_names(model, weights).items() if name not in ignore}
    sentence = None
    different = [name for name, value in state.items() if name in found and found[name].shape != value.shape]
    if different:
        classes = _classes_of_head(model, found, different)
        if classes is None:
            name = different[0]
            raise _misfit(path, f"{name} has shape {_shape(found[name])}, and in the network {_shape(state[name])}")
        sentence = f"the head was replaced: {classes[0]} -> {classes[1]} classes"
    missing = [name for name in state if name not in found and not _is_optional(model, name) and name not in ignore]
    if missing:
        raise _misfit(path, f"{first_few(missing)} of the network {'is' if len(missing) == 1 else 'are'} not in it")
    extra = [name for name in found if name not in state]
    if extra:
        raise _misfit(path, f"the network has no {first_few(extra)}")
    model.load_state_dict(state | {name: value for name, value in found.items() if name not in different})
    return sentence


def _classes_of_head(model: nn.Module, found: Mapping[str, Tensor], different: list[str]) -> tuple[int, int] | None:
    """Return the head's outputs in the file and in the model if tensors of the head alone differ, and only in them."""
    heads = [(name, layer) for name, layer in model.named_modules() if _can_be_head(layer)]
    if not heads:
        return None
    name, head = heads[-1]
    own = {f"{name}.{key}" if name else key: parameter for key, parameter in head.named_parameters(recurse=False)}
    sizes = {(found[key].shape[:1], own[key].shape[:1]) for key in different if key in own}
    fit = all(key in own and found[key].shape[1:] == own[key].shape[1:] for key in different)
    if not fit or len(sizes) != 1 or set(own) & set(found) != set(different):
        return None
    ((before, now),) = sizes
    return before[0], now[0]


def _can_be_head(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1))


def _is_optional(model: nn.Module, name: str) -> bool:
    owner, _, last = name.rpartition(".")
    return last == "num_batches_tracked" or isinstance(model.get_submodule(owner), Normalize)


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "()"


def _misfit(path: Path, why: str) -> DataError:
    return DataError(
        f"the weights of {path} do not fit the network: {why}; choose the network that they were trained for"
    )
