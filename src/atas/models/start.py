"""Start a training from given weights. The head is replaced if they were trained for another number of classes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from torch import Tensor, nn

from atas.core.model_state import state_tensors
from atas.errors import DataError, first_few
from atas.models.layers import Normalize
from atas.models.timm_network import complete_names


def load_start(model: nn.Module, weights: Mapping[str, Tensor], path: Path, ignore: Collection[str] = ()) -> str | None:
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
