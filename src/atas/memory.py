"""What is remembered of each training example between epochs: its perturbation, and how steep its loss was."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from atas.augment import View
from atas.errors import UsageError
from atas.fusing import fusable
from atas.noise import Draw
from atas.threat import Threat

_LEVELS = 127  # int8 holds -127..127, so a perturbation in [-eps, eps] is rounded by at most eps / 254
_CHUNK = 2048  # examples that a reset fills at a time: bounds its temporary memory


class Perturbations(nn.Module):
    """A perturbation of every example, in the frame of its stored image with `pad` pixels around it.

    A view reads and writes its window; what it does not show stays. CIFAR-10 takes 240 MB in int8, four times that in
    float32.
    """

    delta: Tensor

    def __init__(
        self,
        threat: Threat,
        examples: int,
        shape: Sequence[int],
        *,
        pad: int,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if dtype == torch.int8 and not threat.int8_is_enough:
            raise UsageError("int8 steps are too coarse for an L2 ball; use dtype=torch.float16 for this memory")
        if dtype != torch.int8 and not dtype.is_floating_point:
            raise UsageError(f"a memory of perturbations is float32, float16 or int8; got {dtype}")
        self.threat = threat
        channels, height, width = shape
        canvas = (examples, channels, height + 2 * pad, width + 2 * pad)
        self.register_buffer("delta", torch.zeros(canvas, dtype=dtype, device=device))

    def read(self, index: Tensor, view: View, dtype: torch.dtype) -> Tensor:
        """The perturbations of these examples as the view shows them."""
        window = view.read(self.delta, index)
        return window.to(dtype) * self._unit if self.delta.dtype == torch.int8 else window.to(dtype)

    def write(self, index: Tensor, view: View, perturbation: Tensor) -> None:
        """Remember new perturbations, back in the frame of the stored images."""
        _write(self, index, view, perturbation)

    def reset(self, seed: int, epoch: int) -> None:
        """Begin anew with uniform noise on every canvas."""
        for first in range(0, len(self.delta), _CHUNK):
            rows = slice(first, first + _CHUNK)
            index = torch.arange(len(self.delta), device=self.delta.device)[rows]
            draw = Draw(seed, torch.tensor(epoch, device=index.device), index)
            self.delta[rows] = self.encode(self.threat.noise(draw, self.delta.shape[1:], reset=True))

    @property
    def _unit(self) -> float:
        return self.threat.eps / _LEVELS

    def encode(self, perturbation: Tensor) -> Tensor:
        """A perturbation as it is stored."""
        if self.delta.dtype != torch.int8:
            return perturbation.to(self.delta.dtype)
        unit = self._unit or 1.0  # a budget of zero has nothing but zeros to remember
        return (perturbation / unit).round().clamp(-_LEVELS, _LEVELS).to(torch.int8)


@fusable
def _write(memory: Perturbations, index: Tensor, view: View, perturbation: Tensor) -> None:
    view.write(memory.delta, index, memory.encode(perturbation))


class GradientNorms(nn.Module):
    """A moving average of every example's squared gradient norm, and the step size that it last led to."""

    average: Tensor
    step_size: Tensor

    def __init__(self, examples: int, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(examples, device=device))
        self.register_buffer("step_size", torch.zeros(examples, device=device))

    def write(self, index: Tensor, average: Tensor, step_size: Tensor) -> None:
        """Remember the new averages and step sizes of these examples."""
        self.average[index] = average.to(self.average.dtype)
        self.step_size[index] = step_size.to(self.step_size.dtype)
