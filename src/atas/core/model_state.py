"""The state of a module as checkpoints, weights files and averaged weights need it: dense tensors by name."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from atas.errors import UsageError


def state_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's state dict; raise UsageError if it holds anything but dense tensors, which no file can keep.

    >>> list(state_tensors(nn.Linear(2, 1)))
    ['weight', 'bias']
    """
    state = dict(module.state_dict())
    for name, value in state.items():
        if not isinstance(value, Tensor):
            remedy = "keep it in buffers"
            if name.endswith("_extra_state"):
                remedy = "return a tensor from get_extra_state(), or keep it in buffers"
            raise _cannot_be_saved(module, name, f"a {type(value).__name__}", remedy)
        if value.layout is not torch.strided:
            layout = str(value.layout).removeprefix("torch.").replace("_", " ")
            remedy = "store it as a dense tensor, or with persistent=False"
            raise _cannot_be_saved(module, name, f"a {layout} tensor", remedy)
        if value.is_quantized:
            raise _cannot_be_saved(module, name, "a quantized tensor", "quantize the model after the training")
    return state


def _cannot_be_saved(module: nn.Module, name: str, what: str, remedy: str) -> UsageError:
    return UsageError(
        f"{type(module).__name__} cannot be saved, as checkpoints and weights hold dense tensors alone: '{name}' in "
        f"its state_dict() is {what}; {remedy}"
    )
