"""What an attack returned counts only inside the ball."""

from __future__ import annotations

from torch import Tensor

from atas.errors import UsageError
from atas.threat import Threat

_ROUNDING = 1e-3  # a quarter of a grey level


def inside(found: object, x: Tensor, threat: Threat, name: str) -> Tensor:
    """The points that the attack of that name returned for these images, rid of rounding; others are refused."""
    if not isinstance(found, Tensor) or found.shape != x.shape:
        got = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise UsageError(f"the attack '{name}' must return images of shape {tuple(x.shape)}, as it got them; got {got}")
    point = found.detach().to(x)
    allowed = threat.project(point, x)
    if not bool((point - allowed).abs().max() <= _ROUNDING):
        raise UsageError(f"the attack '{name}' leaves {threat} or [0, 1]: let it return threat.project(point, x)")
    return allowed
