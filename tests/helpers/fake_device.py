"""A fake device: tensors on the CPU that say that they live elsewhere, for tests without a GPU.

They compute as ever, and what a GPU refuses they refuse: tensors of both places in one operation, NumPy. Inside
`capturing` they also refuse what a CUDA graph cannot record: the host reads a value, or sends one. PyTorch's own fake
tensors cannot be indexed on a build without CUDA.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

ELSEWHERE = torch.device("meta")  # every build knows it, and nothing of ours computes there
_INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}  # by indices of the host
_MOVES = {"aten::copy_", "aten::_to_copy", "aten::_copy_from"}
_READS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"}  # they return a value to the host
_READS |= {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::repeat_interleave"}
_capturing = False


class FakeTensor(Tensor):
    """A tensor of the CPU that says it lives elsewhere."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> FakeTensor:
        """A wrapper with the shape of what it holds."""
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[no-any-return,attr-defined]
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=ELSEWHERE
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute on the fake device."""
        return _compute(func, args, kwargs or {})

    def tolist(self) -> Any:
        """As on any device."""
        _refuse_capture("tolist")
        return self.inner.tolist()

    def data_ptr(self) -> int:
        """Which memory it is; tied weights have the same."""
        return self.inner.data_ptr()

    def __repr__(self, **_: Any) -> str:
        return f"FakeTensor({self.inner!r})"


class _Device(TorchDispatchMode):
    """What makes tensors, makes them there where it is asked to."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


class _Numbers(TorchFunctionMode):
    """Numbers of Python go there by way of the host; PyTorch would leave them out."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.tensor, torch.as_tensor) or kwargs.get("device") is None:
            return func(*args, **kwargs)
        return func(*args, **{**kwargs, "device": "cpu"}).to(kwargs["device"])


@contextmanager
def fake_device() -> Iterator[torch.device]:
    """Inside, there is another device."""
    with _Device(), _Numbers():
        yield ELSEWHERE


@contextmanager
def work_elsewhere(monkeypatch: Any, *modules: Any) -> Iterator[torch.device]:
    """Inside, there is another device, and these modules work on it: it is what their `select_device` selects."""

    def nothing(*_: Any, **__: Any) -> Any:
        return nullcontext()

    with monkeypatch.context() as patch, fake_device() as found:
        patch.setattr(torch, "autocast", nothing)  # it knows devices by name
        for module in modules:
            if hasattr(module, "select_device"):
                patch.setattr(module, "select_device", lambda *_: found)
            if hasattr(module, "strict_float32"):
                patch.setattr(module, "strict_float32", nothing)
        yield found


@contextmanager
def capturing() -> Iterator[None]:
    """Inside, the host and the fake device may not exchange values, as while a CUDA graph is captured."""
    global _capturing
    _capturing = True
    try:
        yield
    finally:
        _capturing = False


def _refuse_capture(what: str) -> None:
    if _capturing:
        raise RuntimeError(f"{what} exchanges a value with the host, which a CUDA graph cannot record")


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    there = [tensor for tensor in tensors if isinstance(tensor, FakeTensor)]
    wanted = kwargs.get("device")
    _check(func, tensors, there, wanted)
    goes_there = bool(there) if wanted is None else torch.device(wanted) == ELSEWHERE
    if wanted is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    wrappers = {id(tensor.inner): tensor for tensor in there}
    plain_args, plain_kwargs = tree_map(lambda x: x.inner if isinstance(x, FakeTensor) else x, (args, kwargs))
    found = func(*plain_args, **plain_kwargs)

    def placed(result: Any) -> Any:
        if not isinstance(result, Tensor):
            return result
        if id(result) in wrappers:  # changed in place
            return wrappers[id(result)]
        return FakeTensor(result) if goes_there else result

    return tree_map(placed, found)


def _check(func: Any, tensors: list[Tensor], there: list[FakeTensor], wanted: Any) -> None:
    name = func._schema.name
    places = {isinstance(tensor, FakeTensor) for tensor in tensors}
    if name in _MOVES and wanted is not None:
        places.add(torch.device(wanted) == ELSEWHERE)
    masks = name in _INDEXED and any(tensor.dtype == torch.bool for tensor in tensors[1:])
    if (there and (name in _READS or masks)) or (name in _MOVES | _INDEXED and len(places) > 1):
        _refuse_capture(name)
    if not there or name in _MOVES or len(there) == len(tensors):
        return
    here = [tensor for tensor in tensors if not isinstance(tensor, FakeTensor) and tensor.dim() > 0]
    if name in _INDEXED and isinstance(tensors[0], FakeTensor):
        here = [tensor for tensor in here if tensor.dtype not in (torch.int64, torch.bool)]
    if here:
        raise RuntimeError(f"{name} has tensors on two devices: {[tuple(tensor.shape) for tensor in here]} on the host")
