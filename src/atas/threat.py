"""Threat models: the perturbations that an adversary may apply. No other module depends on a norm.

Images are in [0, 1] and all sizes are in pixel units, so 8/255 is eight grey levels. Every point that `project` and
`random_start` return lies inside the ball around the image and inside [0, 1].
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from atas.core.dispatch import fast_op
from atas.core.rng import CounterRNG, Stream
from atas.errors import DataError, UsageError, unknown

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

    @property
    def unmasked(self) -> Threat:
        """The threat model without its mask."""
        return self

    def masked(self, mask: Tensor) -> Masked:
        """Return the threat model in which only the pixels that the mask flags may change.

        Args:
            mask: True (or 1) where a pixel may change; (H, W), (1 or C, H, W), or one per image (N, 1 or C, H, W).

        >>> mask = torch.zeros(4, 4)
        >>> mask[:2] = 1
        >>> Linf(8 / 255).masked(mask)
        Linf(8/255) on 50% of the pixels
        """
        return Masked(self, _check_mask(mask))

    def with_eps(self, eps: float) -> Threat:
        """Return the threat model with another budget."""
        return replace(self, eps=eps)

    def hold(self, point: Tensor, x: Tensor) -> Tensor:
        """Return the point with the pixels of x where no change is allowed; without a mask, the point itself."""
        return point

    def restrict(self, change: Tensor) -> Tensor:
        """Return the change, zero where no change is allowed."""
        return change

    def restrict_sample(self, sample: Tensor, mask: Tensor) -> Tensor:
        """Return perturbations that `sample` returned as samples of the ball of the pixels in the mask."""
        return sample * mask

    def check_images(self, shape: Sequence[int], device: torch.device | None = None) -> None:  # noqa: B027 (optional)
        """Raise if there is a mask that does not fit images of this shape (N, C, H, W), or is on another device."""

    def select(self, rows: Tensor) -> Threat:
        """Return the threat model of some of the images, if each has a mask of its own."""
        return self

    def to(self, device: torch.device) -> Threat:
        """Return the threat model with its mask, if there is one, on a device."""
        return self

    def assign(self, slots: Tensor, threat: Threat, rows: Tensor) -> None:  # noqa: B027 (optional)
        """Write the masks of some images of another threat model to the slots with these numbers."""

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

    def restrict_sample(self, sample: Tensor, mask: Tensor) -> Tensor:
        """Restrict the direction to the mask, and draw the radius for that number of dimensions."""
        free = sample * mask
        total, dimensions = math.prod(sample.shape[1:]), mask.expand_as(sample).flatten(1).sum(1).clamp_min(1)
        radius = (l2_norm(sample) / max(self.eps, 1e-30)) ** (total / dimensions)
        return free * per_example(self.eps * radius / l2_norm(free).clamp_min(1e-30), free)

    def clip(self, perturbation: Tensor) -> Tensor:
        """Shrink perturbations whose norm exceeds eps."""
        shrink = (self.eps / l2_norm(perturbation).clamp_min(1e-30)).clamp_max(1)
        return perturbation * per_example(shrink, perturbation)

    def distance(self, point: Tensor, x: Tensor) -> Tensor:
        """Return the Euclidean norm of the perturbation."""
        return l2_norm(point - x)


class Masked(Threat):
    """A threat model in which only some pixels may change; see `Threat.masked`."""

    mask: Tensor
    """Which pixels may change: (1 or C, H, W), or one per image (N, 1 or C, H, W)."""

    def __init__(self, threat: Threat, mask: Tensor) -> None:
        object.__setattr__(self, "eps", threat.eps)
        object.__setattr__(self, "_unmasked", threat)
        object.__setattr__(self, "mask", mask)

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name of the norm."""
        return self.unmasked.name

    @property
    def fits_int8(self) -> bool:  # type: ignore[override]
        """As without the mask."""
        return self.unmasked.fits_int8

    @property
    def largest_size(self) -> float:  # type: ignore[override]
        """As without the mask."""
        return self.unmasked.largest_size

    @property
    def unmasked(self) -> Threat:
        """The threat model without its mask."""
        unmasked: Threat = self._unmasked  # type: ignore[attr-defined]
        return unmasked

    def __repr__(self) -> str:
        return f"{self.unmasked} on {100 * self.share:.4g}% of the pixels"

    def with_eps(self, eps: float) -> Threat:
        """Return the threat model with another budget."""
        return Masked(self.unmasked.with_eps(eps), self.mask)

    def masked(self, mask: Tensor) -> Masked:
        """Raise UsageError."""
        raise UsageError("the threat model has a mask already; combine the masks with & and pass one")

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Masked) and self.unmasked == other.unmasked and self.mask.shape == other.mask.shape
        return same and torch.equal(self.mask.cpu(), other.mask.cpu())  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((self.unmasked, self.mask.shape))

    @property
    def share(self) -> float:
        """The fraction of the pixels that may change."""
        return float(self.mask.double().mean())

    def check_size(self, name: str, value: float) -> float:
        """Check as without the mask."""
        return self.unmasked.check_size(name, value)

    def check_budget(self, shape: Sequence[int]) -> None:
        """Check as without the mask."""
        self.unmasked.check_budget(shape)

    def radius(self, shape: Sequence[int]) -> float:
        """Return the radius without the mask, which is an upper bound."""
        return self.unmasked.radius(shape)

    def sample(self, rng: CounterRNG, shape: Sequence[int], *, reset: bool = False) -> Tensor:
        """Sample uniformly from the ball of the pixels that may change."""
        return self.unmasked.restrict_sample(self.unmasked.sample(rng, shape, reset=reset), self.mask)

    def step(self, point: Tensor, gradient: Tensor, size: Tensor | float) -> Tensor:
        """Move in the steepest ascent direction of the pixels that may change."""
        return self.unmasked.step(point, self.restrict(gradient), size)

    def project(self, point: Tensor, x: Tensor) -> Tensor:
        """Reset the other pixels, then project."""
        return self.unmasked.project(self.hold(point, x), x)

    def clip(self, perturbation: Tensor) -> Tensor:
        """Reset the perturbation of the other pixels, then project."""
        return self.unmasked.clip(self.restrict(perturbation))

    def distance(self, point: Tensor, x: Tensor) -> Tensor:
        """Return the distance in the norm, over all pixels."""
        return self.unmasked.distance(point, x)

    def hold(self, point: Tensor, x: Tensor) -> Tensor:
        """Return the point with the other pixels of x."""
        return torch.where(self.mask, point, x)

    def restrict(self, change: Tensor) -> Tensor:
        """Return the change, zero at the other pixels."""
        return torch.where(self.mask, change, 0)

    def check_images(self, shape: Sequence[int], device: torch.device | None = None) -> None:
        """Raise unless the mask has the size of the images, and lies on their device."""
        count, channels, *size = shape
        own_channels, *own_size = self.mask.shape[-3:]
        fits = own_channels in (1, channels) and own_size == size
        if not fits or (self.mask.dim() == 4 and len(self.mask) != count):
            raise DataError(f"a mask of shape {tuple(self.mask.shape)} does not fit images of shape {tuple(shape)}")
        if device is not None and self.mask.device != device:
            raise DataError(f"the mask is on {self.mask.device}, the images on {device}: move it with .to()")

    def select(self, rows: Tensor) -> Threat:
        """Return the threat model of some of the images, if each has a mask of its own."""
        return Masked(self.unmasked, self.mask[rows.to(self.mask.device)]) if self.mask.dim() == 4 else self

    def to(self, device: torch.device) -> Threat:
        """Return the threat model with the mask on a device."""
        return Masked(self.unmasked, self.mask.to(device))

    def assign(self, slots: Tensor, threat: Threat, rows: Tensor) -> None:
        """Write the masks of some images of another threat model to the slots with these numbers."""
        if self.mask.dim() == 4 and isinstance(threat, Masked):
            self.mask[slots] = threat.mask[rows]


def _check_mask(mask: object) -> Tensor:
    """Return a mask as flags of 3 or 4 dimensions."""
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 3, 4):
        got = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise DataError(f"a mask is a tensor (H, W), (1 or C, H, W), or one per image (N, 1 or C, H, W); got {got}")
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        raise DataError("a mask holds 0 and 1, or False and True; compare with a threshold first, such as mask > 0.5")
    if not bool(mask.any()):
        raise DataError("the mask lets no pixel change; flag the pixels that may change with 1")
    return mask.bool().unsqueeze(0) if mask.dim() == 2 else mask.bool()


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
