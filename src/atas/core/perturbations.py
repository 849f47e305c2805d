"""One perturbation for every training example, kept between epochs.

Rows are coded as int8 (in units of eps / 127), float16 or float32. They hold every pixel (`FullResolution`) or a coarse
grid (`LowResolution`), on the device or in host memory.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from atas.core.dispatch import fast_op
from atas.core.erasing import PixelView
from atas.core.host_offload import HostOffload
from atas.core.resized_crop import AnyView, BoxView, to_box_view
from atas.core.rng import CounterRNG
from atas.errors import CheckpointError, UsageError, unknown
from atas.threat import Threat

Placement: TypeAlias = Literal["device", "host"]

_LEVELS = 127  # int8 holds -127..127, so a perturbation in [-eps, eps] is rounded by at most eps / 254
_CHUNK = 2048  # examples that a reset fills at a time: bounds its temporary memory


class PerturbationStore(nn.Module, ABC):
    """One coded row for every example: int8 in units of eps / 127, or floats as they are; "auto" is int8 if it is
    precise enough, else float16.

    With `store="host"` the rows stay in host memory, and those of a batch are copied to the device for their step. An
    engine then calls `prefetch`, `before_step` and `after_step`. They do nothing with `store="device"`.
    """

    delta: Tensor

    def __init__(
        self,
        threat: Threat,
        examples: int,
        row_shape: Sequence[int],
        *,
        dtype: torch.dtype | Literal["auto"],
        device: torch.device | str | None = None,
        store: Placement = "device",
    ) -> None:
        super().__init__()
        if dtype == "auto":
            dtype = torch.int8 if threat.fits_int8 else torch.float16
        if dtype == torch.int8 and not threat.fits_int8:
            raise UsageError(
                "int8 steps are too coarse for an L2 ball; use dtype=torch.float16 for this memory, in a recipe "
                "method.dtype=float16"
            )
        if dtype != torch.int8 and not dtype.is_floating_point:
            raise UsageError(f"a memory of perturbations is float32, float16 or int8; got {dtype}")
        if store not in get_args(Placement):
            raise unknown("store of the memory", store, get_args(Placement))
        self.threat = threat
        shape = (examples, *row_shape)
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
        compute_device = torch.device(device if device is not None else "cpu")
        self.offload = HostOffload(delta, compute_device) if store == "host" else None

    @abstractmethod
    def load(self, index: Tensor, view: AnyView, dtype: torch.dtype) -> Tensor:
        """Return the perturbations of these examples, as the view shows them."""

    @abstractmethod
    def store(self, index: Tensor, view: AnyView, perturbation: Tensor) -> None:
        """Store new perturbations in the frame of the stored images."""

    @property
    def nbytes(self) -> int:
        """Size of all rows in bytes."""
        return self.delta.nbytes

    def rows(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tensor on the device that holds the rows of these examples, and their positions in it."""
        if self.offload is None:
            return self.delta, index
        return self.offload.rows, torch.arange(len(index), device=index.device)

    def reset(
        self,
        seed: int,
        epoch: int,
        global_index: Callable[[Tensor], Tensor] | None = None,
        *,
        corners: bool = False,
    ) -> None:
        """Fill every row with uniform noise, or with steps of eps along it: for Linf the corners of the ball.

        `global_index` maps rows to examples of the whole training set, where this process holds a shard of it.
        """
        self.sync()
        device = self.delta.device if self.offload is None else self.offload.device
        for first in range(0, len(self.delta), _CHUNK):
            index = torch.arange(first, min(first + _CHUNK, len(self.delta)), device=device)
            examples = index if global_index is None else global_index(index)
            rng = CounterRNG(seed, torch.tensor(epoch, device=device), examples)
            noise = self.threat.sample(rng, self.delta.shape[1:], reset=True)
            if corners:
                noise = self.threat.step(torch.zeros_like(noise), noise, self.threat.eps)
            self.delta[first : first + _CHUNK] = self.encode(noise).to(self.delta.device)

    def prefetch(self, index: Tensor) -> None:
        """Start copying the rows of the next step to the device."""
        if self.offload is not None:
            self.offload.prefetch(index)

    def before_step(self, index: Tensor) -> None:
        """Make the rows available on the device, fetching them if they were not prefetched."""
        if self.offload is not None:
            self.offload.fetch(index)

    def after_step(self, index: Tensor) -> None:
        """Start copying the rows back to the host."""
        if self.offload is not None:
            self.offload.write_back(index)

    def sync(self) -> None:
        """Wait until every row is back on the host, and drop prefetched rows."""
        if self.offload is not None:
            self.offload.sync()
            self.offload.drop_prefetch()

    @property
    def _unit(self) -> float:
        return self.threat.eps / _LEVELS

    def encode(self, perturbation: Tensor) -> Tensor:
        """Code a perturbation for storage."""
        if self.delta.dtype != torch.int8:
            return perturbation.to(self.delta.dtype)
        unit = self._unit or 1.0  # eps = 0: all perturbations are zero
        return (perturbation / unit).round().clamp(-_LEVELS, _LEVELS).to(torch.int8)

    def decode(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Decode a stored perturbation, of this coding or another one."""
        return stored.to(dtype) * self._unit if stored.dtype == torch.int8 else stored.to(dtype)

    def recode(self, name: str, rows: Tensor) -> Tensor:
        """Return the rows of a saved state in this store's coding; `name` is their name in the state."""
        if rows.dtype == self.delta.dtype:
            return rows
        if rows.dtype != torch.int8 and not rows.dtype.is_floating_point:
            raise CheckpointError(
                f"this state cannot be loaded: {name} is {rows.dtype} in it; a memory of perturbations "
                f"is int8, float16 or float32"
            )
        recoded = torch.empty(rows.shape, dtype=self.delta.dtype, device=rows.device)
        for part, target in zip(rows.split(_CHUNK), recoded.split(_CHUNK), strict=True):
            perturbation = self.decode(part, torch.float32)
            if not bool(perturbation.isfinite().all()):
                raise CheckpointError(f"this state cannot be loaded: {name} holds NaN or infinite values in it")
            target.copy_(self.encode(perturbation))
        return recoded

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.sync()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        self.sync()
        name = f"{prefix}delta"
        if isinstance(rows := state_dict.get(name), Tensor):
            state_dict[name] = self.recode(name, rows)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> PerturbationStore:
        if self.offload is None:
            return super()._apply(fn, recurse)
        self.sync()  # the rows stay on the host, wherever the method is moved
        self.offload = HostOffload(self.delta, fn(torch.empty(0, device=self.offload.device)).device)
        return self


class FullResolution(PerturbationStore):
    """A perturbation of every pixel, in the frame of the stored image with `pad` pixels around it.

    A view reads and writes its window; the rest of the frame keeps its values. CIFAR-10 takes 240 MB in int8, four
    times that in float32.
    """

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        pad: int,
        dtype: torch.dtype | Literal["auto"],
        device: torch.device | str | None = None,
        store: Placement = "device",
    ) -> None:
        channels, height, width = shape
        row = (channels, height + 2 * pad, width + 2 * pad)
        super().__init__(threat, examples, row, dtype=dtype, device=device, store=store)

    def load(self, index: Tensor, view: AnyView, dtype: torch.dtype) -> Tensor:
        """Return the windows of these examples."""
        return self.decode(_require_pixel_view(view).read(*self.rows(index)), dtype)

    def store(self, index: Tensor, view: AnyView, perturbation: Tensor) -> None:
        """Write the windows back."""
        store_pixels(self, index, view, perturbation)


@fast_op
def store_pixels(perturbations: FullResolution, index: Tensor, view: AnyView, perturbation: Tensor) -> None:
    """Write perturbations of windows back to the stored frame, coded."""
    _require_pixel_view(view).write(*perturbations.rows(index), perturbations.encode(perturbation))


def _require_pixel_view(view: AnyView) -> PixelView:
    if isinstance(view, BoxView):
        raise UsageError(
            "a resampled view shows no pixel as it is stored, so a memory of every pixel cannot follow it; keep "
            "perturbations at low resolution, with grid=32 for example"
        )
    return view


class LowResolution(PerturbationStore):
    """A perturbation on `grid` x `grid` cells that cover the stored image (Algorithm 2 of the paper).

    Loading resamples the part of the grid that a view shows to the size of the view. Storing resamples the new
    perturbation back to the grid. The image size does not matter and may change between epochs. ImageNet's training set
    takes 3.9 GB in int8 and 7.9 GB in float16 at 32 x 32.
    """

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        grid: int = 32,
        dtype: torch.dtype | Literal["auto"],
        device: torch.device | str | None = None,
        store: Placement = "device",
    ) -> None:
        if grid < 1:
            raise UsageError(f"grid must be at least 1 cell a side; got {grid}")
        if grid > max(shape[1:]):
            raise UsageError(
                f"grid = {grid} cells a side are more than the pixels of images of {shape[1]} x {shape[2]}; use a "
                f"smaller grid, or none to remember every pixel"
            )
        super().__init__(threat, examples, (shape[0], grid, grid), dtype=dtype, device=device, store=store)
        self.frame = (int(shape[1]), int(shape[2]))

    def load(self, index: Tensor, view: AnyView, dtype: torch.dtype) -> Tensor:
        """Return the part of the grids that the view shows, clipped to the ball."""
        rows, positions = self.rows(index)
        return self.threat.clip(to_box_view(view, self.frame).read(self.decode(rows[positions], dtype)))

    def store(self, index: Tensor, view: AnyView, perturbation: Tensor) -> None:
        """Update the grids; cells without a pixel of the view keep their values."""
        store_grids(self, index, view, perturbation)


@fast_op
def store_grids(perturbations: LowResolution, index: Tensor, view: AnyView, perturbation: Tensor) -> None:
    """Fit the grids to perturbations of resampled windows, and write them, coded."""
    rows, positions = perturbations.rows(index)
    grids = perturbations.decode(rows[positions], perturbation.dtype)
    grids = to_box_view(view, perturbations.frame).update(grids, perturbation)
    rows[positions] = perturbations.encode(perturbations.threat.clip(grids))
