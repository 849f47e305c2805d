"""The state of a model as checkpoints, weights files and averaged weights need it: dense tensors by name."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from atas.errors import UsageError


def state_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's state dict; raise UsageError if it holds anything but dense tensors, which no file can keep.

    >>> list(state_tensors(nn.Linear(2, 1)))
    ['weight', 'bias']
    """
    state = dict(model.state_dict())
    for name, value in state.items():
        if not isinstance(value, Tensor):
            remedy = "keep it in buffers"
            if name.endswith("_extra_state"):
                remedy = "return a tensor from get_extra_state(), or keep it in buffers"
            raise _cannot_be_saved(name, f"a {type(value).__name__}", remedy)
        if value.layout is not torch.strided:
            layout = str(value.layout).removeprefix("torch.").replace("_", " ")
            raise _cannot_be_saved(name, f"a {layout} tensor", "store it as a dense tensor, or with persistent=False")
        if value.is_quantized:
            raise _cannot_be_saved(name, "a quantized tensor", "quantize the model after the training")
    return state


def _cannot_be_saved(name: str, what: str, remedy: str) -> UsageError:
    return UsageError(
        f"the model cannot be saved, as checkpoints and weights hold dense tensors alone: '{name}' in its state_dict() "
        f"is {what}; {remedy}"
    )
