"""What every memory of perturbations is: coded rows, on the device or on the host."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from atas.boxes import AnyView
from atas.errors import UsageError, unknown
from atas.noise import Draw
from atas.parts import Part
from atas.threat import Threat
from atas.visits import Visits

Store: TypeAlias = Literal["device", "host"]

_LEVELS = 127  # int8 holds -127..127, so a perturbation in [-eps, eps] is rounded by at most eps / 254
_CHUNK = 2048  # examples that a reset fills at a time: bounds its temporary memory


class Memory(nn.Module, ABC):
    """One row of coded numbers for every example: int8 in units of eps / 127, or floats as they are.

    With `store="host"` the rows live in the host's memory and those of a batch visit the device for their step; an
    engine announces steps by `prefetch`, `before_step` and `after_step`, which do nothing otherwise.
    """

    delta: Tensor

    def __init__(
        self,
        threat: Threat,
        examples: int,
        row: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
        store: Store = "device",
    ) -> None:
        super().__init__()
        if dtype == torch.int8 and not threat.int8_is_enough:
            raise UsageError(
                "int8 steps are too coarse for an L2 ball; use dtype=torch.float16 for this memory, in a recipe "
                "method.dtype=float16"
            )
        if dtype != torch.int8 and not dtype.is_floating_point:
            raise UsageError(f"a memory of perturbations is float32, float16 or int8; got {dtype}")
        if store not in get_args(Store):
            raise unknown("store of the memory", store, get_args(Store))
        self.threat, self.part = threat, Part(examples)
        shape = (examples, *row)
        try:
            delta = torch.zeros(shape, dtype=dtype, device=device if store == "device" else "cpu")
        except RuntimeError as error:
            on_gpu = isinstance(error, torch.OutOfMemoryError)
            if not on_gpu and "can't allocate memory" not in str(error):  # the host's shortage has no class of its own
                raise
            raise UsageError(
                f"the memory of perturbations takes {math.prod(shape) * dtype.itemsize / 1e9:.1f} GB, more than the "
                f"{'device' if on_gpu else 'host'} has left; keep it {'with store=host, ' if on_gpu else ''}at low "
                f"resolution with grid=32, or in int8"
            ) from error
        self.register_buffer("delta", delta)
        home = torch.device(device if device is not None else "cpu")
        self.visits = Visits(delta, home) if store == "host" else None

    @abstractmethod
    def read(self, index: Tensor, view: AnyView, dtype: torch.dtype) -> Tensor:
        """The perturbations of these examples as the view shows them."""

    @abstractmethod
    def write(self, index: Tensor, view: AnyView, perturbation: Tensor) -> None:
        """Remember new perturbations, back in the frame of the stored images."""

    @property
    def nbytes(self) -> int:
        """Bytes that the rows take, wherever they live."""
        return self.delta.nbytes

    def rows(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Where the rows of these examples are on the device: in which tensor, and at which places of it."""
        if self.visits is None:
            return self.delta, index
        return self.visits.rows, torch.arange(len(index), device=index.device)

    def reset(self, seed: int, epoch: int) -> None:
        """Begin anew with uniform noise in every row."""
        self.settle()
        device = self.delta.device if self.visits is None else self.visits.device
        for first in range(0, len(self.delta), _CHUNK):
            index = torch.arange(first, min(first + _CHUNK, len(self.delta)), device=device)
            draw = Draw(seed, torch.tensor(epoch, device=device), self.part.numbers(index))
            noise = self.threat.noise(draw, self.delta.shape[1:], reset=True)
            self.delta[first : first + _CHUNK] = self.encode(noise).to(self.delta.device)

    def prefetch(self, index: Tensor) -> None:
        """Begin to bring the rows of the next step."""
        if self.visits is not None:
            self.visits.prefetch(index)

    def before_step(self, index: Tensor) -> None:
        """The rows of these examples are on the device for what the device does next."""
        if self.visits is not None:
            self.visits.arrive(index)

    def after_step(self, index: Tensor) -> None:
        """Begin to take the rows of these examples back."""
        if self.visits is not None:
            self.visits.leave(index)

    def settle(self) -> None:
        """Wait until every row is where it lives, and forget what was brought ahead."""
        if self.visits is not None:
            self.visits.settle()
            self.visits.forget()

    @property
    def _unit(self) -> float:
        return self.threat.eps / _LEVELS

    def encode(self, perturbation: Tensor) -> Tensor:
        """A perturbation as it is stored."""
        if self.delta.dtype != torch.int8:
            return perturbation.to(self.delta.dtype)
        unit = self._unit or 1.0  # a budget of zero has nothing but zeros to remember
        return (perturbation / unit).round().clamp(-_LEVELS, _LEVELS).to(torch.int8)

    def decode(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """What was stored, as a perturbation."""
        return stored.to(dtype) * self._unit if self.delta.dtype == torch.int8 else stored.to(dtype)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.settle()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.settle()
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Memory:
        if self.visits is None:
            return super()._apply(fn, recurse)
        self.settle()  # the rows stay on the host, whatever the method is moved to
        self.visits = Visits(self.delta, fn(torch.empty(0, device=self.visits.device)).device)
        return self
