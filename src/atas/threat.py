"""Threat models: the perturbations that an adversary may apply. No other module depends on a norm.

Images are in [0, 1] and all sizes are in pixel units, so 8/255 is eight grey levels. Every point that `project` and
`random_start` return lies inside the ball around the image and inside [0, 1].
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from atas.core.dispatch import fast_op
from atas.core.rng import CounterRNG, Stream
from atas.errors import UsageError, unknown

_LEVELS_OF_A_FIFTH = 51  # 51/255 = 0.2


class EpsMultiple(str):
    """A size that follows the budget, as recipes write it: a multiple of eps.

    >>> EpsMultiple("1.75eps"), EpsMultiple("1.75 eps").factor
    ('1.75 eps', 1.75)
    """

    __slots__ = ()

    def __new__(cls, text: str) -> Self:
        """Accept a positive multiple; raise ValueError for any other text."""
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*eps\s*", text, re.ASCII)
        if match is None or not 0 < float(match[1]) < math.inf:
            raise ValueError(f"not a multiple of eps: {text!r}")
        return super().__new__(cls, f"{match[1]} eps")

    @property
    def factor(self) -> float:
        """The size divided by eps."""
        return float(self.removesuffix(" eps"))


Size = float | Literal["auto"] | EpsMultiple  # of a step, as a setting of a method


def per_example(value: Tensor | float, like: Tensor) -> Tensor | float:
    """Reshape one number per example so that it multiplies a batch of images; leave a single number as it is."""
    if isinstance(value, Tensor) and value.dim() == 1:
        return value.to(like.dtype).view(-1, *(1,) * (like.dim() - 1))
    return value


def l2_norm(x: Tensor) -> Tensor:
    """Return the Euclidean norm of each example of a batch, in float32 or wider."""
    return torch.linalg.vector_norm(_wide(x.flatten(1)), dim=1)


def _wide(x: Tensor) -> Tensor:
    """Return a tensor in float32, or in float64 as it is."""
    return x if x.dtype == torch.float64 else x.float()


@dataclass(frozen=True)
class Threat(ABC):
    """All points within `eps` of an image in some norm, with pixels in [0, 1]."""

    eps: float
    name: ClassVar[str]
    fits_int8: ClassVar[bool]  # whether 255 levels per pixel store a perturbation well
    largest_size: ClassVar[float] = math.inf  # a longer step reaches nothing more

    def __post_init__(self) -> None:
        if not isinstance(self.eps, int | float) or isinstance(self.eps, bool):
            raise UsageError(f"eps must be a number such as 8/255; got {self.eps!r}")
        if not math.isfinite(self.eps) or self.eps < 0:
            raise UsageError(f"eps must be a number that is not negative, in pixel units such as 8/255; got {self.eps}")

    def check_size(self, name: str, value: float) -> float:
        """Return a step size if it is valid, else raise; `name` is the user's name for it."""
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UsageError(f"{name} must be a number above zero, in pixel units such as 2/255; got {value!r}")
        return float(value)

    def size(self, name: str, value: Size | None, auto: float) -> float:
        """Return a step size in pixel units. A number is checked, a text such as "2 eps" multiplied out, and "auto" or
        None is `auto` times eps. `name` is the user's name for it.

        >>> Linf(0.1).size("max_step", "auto", 2), Linf(0.1).size("max_step", "4 eps", 2)
        (0.2, 0.4)
        """
        if not isinstance(value, str) and value is not None:
            return self.check_size(name, value)
        try:
            factor = auto if value in ("auto", None) else EpsMultiple(str(value)).factor
        except ValueError:
            raise UsageError(
                f"{name} must be a number in pixel units such as 2/255, 'auto', or a multiple of eps such as '2 eps'; "
                f"got {value!r}"
            ) from None
        return min(factor * self.eps, self.largest_size)

    @abstractmethod
    def check_budget(self, shape: Sequence[int]) -> None:
        """Raise if the ball contains every image of this shape."""

    @abstractmethod
    def radius(self, shape: Sequence[int]) -> float:
        """Return the Euclidean norm of the longest perturbation of an image of this shape."""

    @abstractmethod
    def sample(self, rng: CounterRNG, shape: Sequence[int], *, reset: bool = False) -> Tensor:
        """Sample perturbations uniformly from the ball, of shape (batch, *shape)."""

    @abstractmethod
    def step(self, point: Tensor, gradient: Tensor, size: Tensor | float) -> Tensor:
        """Move by `size` (a number, or one per example) in the steepest ascent direction of this norm."""

    @abstractmethod
    def project(self, point: Tensor, x: Tensor) -> Tensor:
        """Project a point onto the ball around x and onto [0, 1]."""

    @abstractmethod
    def clip(self, perturbation: Tensor) -> Tensor:
        """Project perturbations onto the ball."""

    @abstractmethod
    def distance(self, point: Tensor, x: Tensor) -> Tensor:
        """Return the distance of each example to its image."""

    def ascend(self, point: Tensor, gradient: Tensor, size: Tensor | float, x: Tensor) -> Tensor:
        """Take a step up the gradient and project it."""
        return ascend(self, point, gradient, size, x)

    def random_start(self, x: Tensor, rng: CounterRNG) -> Tensor:
        """Return a random point of the ball around each image."""
        return random_start(self, x, rng.seed, rng.epoch, rng.index)


@fast_op
def ascend(threat: Threat, point: Tensor, gradient: Tensor, size: Tensor | float, x: Tensor) -> Tensor:
    """Take a step up the gradient and project it."""
    return threat.project(threat.step(point, gradient, size), x)


@fast_op
def random_start(threat: Threat, x: Tensor, seed: int, epoch: Tensor, index: Tensor) -> Tensor:
    """Add noise from the ball to each image and project it."""
    return threat.project(x + threat.sample(CounterRNG(seed, epoch, index), x.shape[1:]).to(x.dtype), x)


@dataclass(frozen=True)
class Linf(Threat):
    """Every pixel may change by at most eps.

    >>> Linf(8 / 255)
    Linf(8/255)
    """

    name: ClassVar[str] = "linf"
    fits_int8: ClassVar[bool] = True
    largest_size: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_pixel_units("eps", self.eps)

    def check_size(self, name: str, value: float) -> float:
        """Return a step size that is at most the range of a pixel."""
        return _check_pixel_units(name, super().check_size(name, value))

    def __repr__(self) -> str:
        return f"Linf({format_pixels(self.eps)})"

    def check_budget(self, shape: Sequence[int]) -> None:
        """Accept every shape: eps is at most 1."""

    def radius(self, shape: Sequence[int]) -> float:
        """Return the Euclidean norm of a corner of the ball."""
        return self.eps * math.sqrt(math.prod(shape))

    def sample(self, rng: CounterRNG, shape: Sequence[int], *, reset: bool = False) -> Tensor:
        """Sample every pixel uniformly from [-eps, eps]."""
        return (2 * rng.uniform(Stream.RESET if reset else Stream.START, shape) - 1) * self.eps

    def step(self, point: Tensor, gradient: Tensor, size: Tensor | float) -> Tensor:
        """Move each pixel by `size` along the sign of the gradient."""
        return point + per_example(size, point) * gradient.sign().to(point.dtype)

    def project(self, point: Tensor, x: Tensor) -> Tensor:
        """Clip every pixel to eps around the image, then to [0, 1]."""
        return torch.minimum(torch.maximum(point, x - self.eps), x + self.eps).clamp(0, 1)

    def clip(self, perturbation: Tensor) -> Tensor:
        """Clip every pixel to eps."""
        return perturbation.clamp(-self.eps, self.eps)

    def distance(self, point: Tensor, x: Tensor) -> Tensor:
        """Return the largest change of a pixel."""
        return (point - x).flatten(1).abs().amax(1)


@dataclass(frozen=True)
class L2(Threat):
    """The change of all pixels together has a Euclidean norm of at most eps.

    >>> L2(0.5)
    L2(0.5)
    """

    name: ClassVar[str] = "l2"
    fits_int8: ClassVar[bool] = False

    def __repr__(self) -> str:
        return f"L2({self.eps:g})"

    def check_budget(self, shape: Sequence[int]) -> None:
        """Raise if eps exceeds the distance between a black and a white image."""
        if self.eps > math.sqrt(math.prod(shape)):
            raise UsageError(
                f"an L2 budget of {self.eps:g} turns any image of shape {tuple(shape)} into any other; pixels are in "
                f"[0, 1], so write {self.eps:g}/255 if that was meant for 0..255"
            )

    def radius(self, shape: Sequence[int]) -> float:
        """Return eps."""
        return self.eps

    def sample(self, rng: CounterRNG, shape: Sequence[int], *, reset: bool = False) -> Tensor:
        """Sample a uniform direction, and a radius whose d-th power is uniform."""
        direction = rng.normal(Stream.RESET if reset else Stream.START, shape)
        radius = rng.uniform(Stream.RESET_RADIUS if reset else Stream.RADIUS) ** (1 / math.prod(shape))
        return direction * per_example(self.eps * radius / l2_norm(direction).clamp_min(1e-12), direction)

    def step(self, point: Tensor, gradient: Tensor, size: Tensor | float) -> Tensor:
        """Move by `size` along the normalised gradient. An example with zero gradient does not move."""
        # Scale to a largest entry of one first: squares of very small or large gradients leave the range of float32.
        gradient = _wide(gradient)
        largest = gradient.flatten(1).abs().amax(1)
        direction = gradient / per_example(torch.where(largest > 0, largest, 1.0), gradient)
        direction = direction / per_example(l2_norm(direction).clamp_min(1e-12), direction)
        return point + per_example(size, point) * direction.to(point.dtype)

    def project(self, point: Tensor, x: Tensor) -> Tensor:
        """Shrink the perturbation to eps, then clip to [0, 1], which only shrinks it further."""
        return (x + self.clip(point - x)).clamp(0, 1)

    def clip(self, perturbation: Tensor) -> Tensor:
        """Shrink perturbations whose norm exceeds eps."""
        shrink = (self.eps / l2_norm(perturbation).clamp_min(1e-30)).clamp_max(1)
        return perturbation * per_example(shrink, perturbation)

    def distance(self, point: Tensor, x: Tensor) -> Tensor:
        """Return the Euclidean norm of the perturbation."""
        return l2_norm(point - x)


def _check_pixel_units(name: str, value: float) -> float:
    if value > 1:
        raise UsageError(f"{name} is in pixel units of [0, 1]: write {value:g}/255 rather than {value:g}")
    return value


def create(name: str, eps: float) -> Threat:
    """Create the threat model `linf` or `l2`."""
    for threat in (Linf, L2):
        if threat.name == name:
            return threat(eps)
    raise unknown("norm", name, [Linf.name, L2.name])


def format_pixels(value: float) -> str:
    """Format a size as k/255 if it is a whole number of grey levels: 8/255 rather than 0.0314.

    Multiples of 51/255 are short decimals and stay decimals.

    >>> format_pixels(8 / 255), format_pixels(0.2), format_pixels(0.1)
    ('8/255', '0.2', '0.1')
    """
    levels = round(value * 255)
    whole = abs(levels - value * 255) < 1e-6 and (levels or not value)
    return f"{levels}/255" if whole and (levels % _LEVELS_OF_A_FIFTH or not levels) else f"{value:g}"
