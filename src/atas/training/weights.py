"""Weights of a trained model as safetensors, with what is needed to build the model again.

Reading one runs no code that a file brings along, and what is damaged is told from what is whole by a hash in the file.
Files of torch.save are read where they hold tensors alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from atas import models
from atas._files import write_atomically
from atas._text import in_shell
from atas.errors import AtasError, CheckpointError, DataError, UsageError
from atas.evaluation._fingerprint import state_hash
from atas.training.checkpoint import LAST, separate

_KEY = "atas-model-1"
_PICKLES = (
    b"PK\x03\x04",
    b"\x80\x02",
    b"\x80\x03",
    b"\x80\x04",
    b"\x80\x05",
)  # what torch.save writes, today and long ago
_PROGRAMS = {".onnx": "onnxruntime.InferenceSession", ".pt2": "torch.export.load"}
_PLACES = ("state_dict", "model_state_dict", "model", "net")  # of weights in checkpoints
_PARALLEL = "module."
GIVEN = "given:"  # marks a model or data set that was passed in Python and has no name to load it by


def save_weights(path: Path, model: nn.Module, about: dict[str, Any]) -> None:
    """Weights as safetensors; `about` holds name, num_classes, channels, mean and std, and what else is known."""
    tensors = separate(model.state_dict())
    metadata = {_KEY: json.dumps(about | {"weights": state_hash(tensors)})}
    try:
        write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write the weights {path} ({error}); make room and go on with --resume"
        ) from error


def read_weights(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a file says about its model (nothing, where another program wrote it), and the tensors, verified."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get(_KEY, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        if _is_pickle(path):  # asked only now: the length that safetensors begin with may look like one
            return {}, _unpickled(path)
        raise _unreadable(path, error) from error
    if not isinstance(about, dict):
        raise _damaged(path, "what it says of its model is no JSON object")
    if "weights" in about and about["weights"] != state_hash(tensors):
        raise _damaged(path, "its tensors are not those that were written")
    return about, tensors


def is_whole(path: Path) -> bool:
    """Whether a weights file is there and can be read."""
    try:
        read_weights(path)
    except DataError:
        return False
    return True


def load_weights(path: Path, model: nn.Module | None = None) -> nn.Module:
    """The model of a weights file, built by its name on the CPU, or given and left where it is; in eval mode."""
    about, tensors = read_weights(path)
    if model is None:
        model = _build(path, about)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise DataError(
            f"the weights of {path} do not fit this model: {str(error).splitlines()[-1].strip()}"
        ) from error
    return model.eval()


def of_all_channels(values: Any) -> Any:
    """A recipe writes one number for all channels as a list of one; models take the number."""
    return values[0] if isinstance(values, list | tuple) and len(values) == 1 else values


def _build(path: Path, about: dict[str, Any]) -> nn.Module:
    name = about.get("name")
    if name is None and not about:
        raise UsageError(f"{path} does not say which model its weights are of; name it with --model, or pass it")
    if not isinstance(name, str) or name.startswith(GIVEN):
        raise UsageError(f"the model of {path} was made in Python; pass it to atas.Run.load(folder, model=...)")
    missing = [key for key in ("num_classes", "channels", "mean", "std") if key not in about]
    if missing:
        raise _damaged(path, f"it does not say {missing[0]}")
    with torch.random.fork_rng(devices=[]):
        try:
            mean, std = of_all_channels(about["mean"]), of_all_channels(about["std"])
            return models.create(name, about["num_classes"], about["channels"], mean, std)
        except (AtasError, ValueError, TypeError, RuntimeError, MemoryError) as error:
            if ":" in name:  # the user's own code
                raise
            raise _damaged(path, str(error).splitlines()[0]) from error


def _is_pickle(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4).startswith(_PICKLES)


def _unpickled(path: Path) -> dict[str, Tensor]:
    """The state dict in a file of torch.save, by itself or in a checkpoint, and without what DataParallel adds."""
    if path.suffix in _PROGRAMS:
        raise DataError(f"{path} holds a program, not weights; load it with {_PROGRAMS[path.suffix]}")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DataError(
            f"{path} is a pickle that holds more than tensors, or is damaged, and could run any code; load it where "
            f"you trust it and write its state dict with safetensors.torch.save_file"
        ) from error
    places = [found, *(found[key] for key in _PLACES if key in found)] if isinstance(found, dict) else []
    for tensors in places:
        if isinstance(tensors, dict) and tensors and all(isinstance(value, Tensor) for value in tensors.values()):
            shared = all(str(name).startswith(_PARALLEL) for name in tensors)
            return {str(name).removeprefix(_PARALLEL if shared else ""): value for name, value in tensors.items()}
    raise DataError(f"{path} holds no state dict, by itself or as {', '.join(_PLACES)}; save model.state_dict()")


def _unreadable(path: Path, error: Exception) -> DataError:
    if not path.exists():
        return DataError(f"there is no weights file {path}; check the path")
    if path.suffix in _PROGRAMS:
        return DataError(f"{path} holds a program, not weights; load it with {_PROGRAMS[path.suffix]}")
    return DataError(f"the weights file {path} cannot be read ({str(error).splitlines()[0]}); {_remedy(path)}")


def _damaged(path: Path, why: str) -> DataError:
    return DataError(f"the weights file {path} is damaged ({why}); {_remedy(path)}")


def _remedy(path: Path) -> str:
    if (path.parent / LAST).exists():
        return f"write it anew from the last checkpoint: atas train --resume --out {in_shell(path.parent)}"
    return "restore it or train again"
