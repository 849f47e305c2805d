"""Weights of a trained model as safetensors, with the metadata to build the model again.

Reading a file runs no code from it. A hash in the file detects damage. Files of torch.save are read if they hold only
tensors.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from atas import models
from atas._utils.documents import MalformedError, conform, parse_json
from atas._utils.files import write_atomically
from atas._utils.formatting import describe_failure, shell_quote
from atas._utils.imports import GIVEN, is_code, is_timm
from atas.core.autograd import eval_mode
from atas.core.fingerprint import state_hash
from atas.core.model_state import state_tensors
from atas.errors import AtasError, CheckpointError, DataError, UsageError
from atas.models import published

LAST_CHECKPOINT = Path("checkpoints", "last.safetensors")  # in a run's folder
_KEY = "atas-model-1"
_PICKLES = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")  # first bytes of torch.save files
_PROGRAMS = {".onnx": "onnxruntime.InferenceSession", ".pt2": "torch.export.load"}
_STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model", "net")  # of the weights in a checkpoint
_PARALLEL = "module."
_MAX_PIXELS = 1 << 28  # of an image


class _Metadata(TypedDict, total=False):
    """The metadata of a weights file, all of them optional."""

    name: str
    num_classes: int
    channels: int
    mean: float | list[float] | None
    std: float | list[float] | None
    shape: tuple[int, int, int]
    options: dict[str, bool | float | str | list[bool | float | str] | None]
    classes: list[str]
    weights: str
    data: str
    method: str
    threat: str


def save_weights(
    path: Path, model: nn.Module, metadata: dict[str, Any], *, half: bool = False, again: str = "export again"
) -> None:
    """Write weights as safetensors; `metadata` holds at least name, num_classes, channels, mean and std.

    With `half`, weight matrices and kernels are rounded to float16. Biases and the values of BatchNorm, which may
    exceed its range, are not. `again` is what to do after making room if the disk is full.
    """
    tensors = unshare_storage(state_tensors(model))
    if half:
        tensors = {name: _rounded(tensor) for name, tensor in tensors.items()}
    header = {_KEY: json.dumps(metadata | {"weights": state_hash(tensors)})}
    try:
        write_atomically(path, lambda temporary: save_file(tensors, temporary, header))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write the weights {path} ({describe_failure(error)}); make room and {again}"
        ) from error


def _rounded(tensor: Tensor) -> Tensor:
    """Return a matrix or kernel in float32 rounded to float16, and other tensors as they are."""
    if tensor.dtype != torch.float32 or tensor.dim() < 2 or tensor.abs().max() > torch.finfo(torch.half).max:
        return tensor
    return tensor.half()


def read_weights(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the metadata of a file (empty if another program wrote it) and its tensors, verified."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = parse_json((file.metadata() or {}).get(_KEY, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError) as error:
        if _is_pickle(path):  # only after an error: the first bytes of a safetensors file may look alike
            return {}, _unpickled(path)
        raise _unreadable(path, error) from error
    try:
        _check_metadata(metadata, tensors)
    except MalformedError as error:
        raise _damaged(path, f"its metadata: {error}") from error
    if "weights" in metadata and metadata["weights"] != state_hash(tensors):
        raise _damaged(path, "the hash of its tensors is wrong")
    return metadata, tensors


def _check_metadata(metadata: Any, tensors: dict[str, Tensor]) -> None:
    """Raise MalformedError if types are wrong, or sizes are larger than the weights and an image can be."""
    if not isinstance(metadata, dict):
        raise MalformedError("not a JSON object")
    conform(metadata, _Metadata)
    most = sum(tensor.numel() for tensor in tensors.values())
    for key in ("num_classes", "channels"):
        if key in metadata and not 0 < metadata[key] <= most:
            raise MalformedError(f"{key} is {metadata[key]}, and the file has {most} weights")
    sides = metadata.get("shape", [1])
    if min(sides) < 1 or math.prod(sides) > _MAX_PIXELS:
        raise MalformedError(f"shape is {' x '.join(map(str, sides))}")


def is_readable(path: Path) -> bool:
    """Return whether a weights file exists and can be read."""
    try:
        read_weights(path)
    except DataError:
        return False
    return True


def load_weights(path: Path, model: nn.Module | None = None, *, trust: bool | str = False) -> nn.Module:
    """Load a model in eval mode: built by its name on the CPU, or the given model on its device.

    `trust` allows the file to name code as its model: any (True), or the model of this name that the user gave.
    """
    metadata, tensors = read_weights(path)
    if model is None:
        if metadata.get("name") in models.names():
            with torch.device("meta"):  # an absurd number of classes in the metadata costs no memory there
                _load_state_dict(path, _build(path, metadata, trust), tensors, assign=True)
        model = _build(path, metadata, trust)
    _load_state_dict(path, model, tensors)
    return eval_mode(model)


def _load_state_dict(path: Path, model: nn.Module, tensors: dict[str, Tensor], *, assign: bool = False) -> None:
    try:
        model.load_state_dict(tensors, assign=assign)
    except RuntimeError as error:
        why = _first_mismatch(model, tensors) or str(error).splitlines()[-1].strip()
        raise DataError(f"the weights of {path} do not fit this model: {why}") from error


def _first_mismatch(model: nn.Module, tensors: dict[str, Tensor]) -> str | None:
    """Return how the first tensor of another shape differs; None if the shapes of tensors of one name are equal."""
    for name, tensor in model.state_dict().items():
        if name in tensors and tensors[name].shape != tensor.shape:
            return f"{name} has the shape {tuple(tensors[name].shape)} there and {tuple(tensor.shape)} in the model"
    return None


def per_channel(values: Any) -> Any:
    """Return the number in a list of one: recipes write a value for all channels so, and models take the number."""
    return values[0] if isinstance(values, list | tuple) and len(values) == 1 else values


def _build(path: Path, metadata: dict[str, Any], trust: bool | str) -> nn.Module:
    name = metadata.get("name")
    if name is None and not metadata:
        raise UsageError(f"{path} does not name the model of its weights; name it with --model, or pass it")
    if not isinstance(name, str) or name.startswith(GIVEN):
        raise UsageError(f"the model of {path} was passed in Python; pass it to atas.Run.load(folder, model=...)")
    missing = [key for key in ("num_classes", "channels", "mean", "std") if key not in metadata]
    if missing:
        raise _damaged(path, f"{missing[0]} is missing in its metadata")
    with torch.random.fork_rng(devices=[]):
        try:
            mean, std = per_channel(metadata["mean"]), per_channel(metadata["std"])
            trusted = trust is True or trust == name
            return models.create(
                name,
                metadata["num_classes"],
                metadata["channels"],
                mean,
                std,
                size=metadata["shape"][1:] if "shape" in metadata else None,
                options=metadata.get("options"),
                trusted=trusted,
            )
        except (AtasError, ValueError, TypeError, RuntimeError, MemoryError) as error:
            if is_code(name) or is_timm(name):  # the error is in other code, which may be absent
                raise
            raise _damaged(path, str(error).splitlines()[0]) from error


def _is_pickle(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4).startswith(_PICKLES)


def _unpickled(path: Path) -> dict[str, Tensor]:
    """Return the state dict in a file of torch.save, also from a checkpoint, without the prefix of DataParallel."""
    if path.suffix in _PROGRAMS:
        raise DataError(f"{path} holds a program, not weights; load it with {_PROGRAMS[path.suffix]}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise DataError(
            f"{path} is a pickle that holds more than tensors, or is damaged, and could run any code; load it where "
            f"you trust it and write its state dict with safetensors.torch.save_file"
        ) from error
    candidates = (
        [content, *(content[key] for key in _STATE_DICT_KEYS if key in content)] if isinstance(content, dict) else []
    )
    for tensors in candidates:
        if isinstance(tensors, dict) and tensors and all(isinstance(value, Tensor) for value in tensors.values()):
            shared = all(str(name).startswith(_PARALLEL) for name in tensors)
            return {str(name).removeprefix(_PARALLEL if shared else ""): value for name, value in tensors.items()}
    raise DataError(
        f"{path} holds no state dict, by itself or as {', '.join(_STATE_DICT_KEYS)}; save model.state_dict()"
    )


def _unreadable(path: Path, error: Exception) -> DataError:
    if not path.exists() and not path.suffix:  # as the name of a model
        return published.not_found(path)
    if not path.exists():
        return DataError(f"there is no weights file {path}; check the path")
    if path.is_dir():
        return DataError(f"{path} is a folder, not a weights file; pass a file in it, or the folder as a run")
    if path.suffix in _PROGRAMS:
        return DataError(f"{path} holds a program, not weights; load it with {_PROGRAMS[path.suffix]}")
    return DataError(f"the weights file {path} cannot be read ({str(error).splitlines()[0]}); {_remedy(path)}")


def _damaged(path: Path, why: str) -> DataError:
    return DataError(f"the weights file {path} is damaged ({why}); {_remedy(path)}")


def _remedy(path: Path) -> str:
    if (path.parent / LAST_CHECKPOINT).exists():
        return f"restore it from the last checkpoint: atas train --resume --out {shell_quote(path.parent)}"
    return "restore it or train again"


def unshare_storage(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors on the host, no two in the same memory: tied weights are written once per name."""
    separate: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return separate
