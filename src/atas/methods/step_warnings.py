"""Warnings about step sizes that are valid but cannot work at the budget of the method.

The limits leave out all that the paper and its studies train with.
"""

from __future__ import annotations

import warnings

from atas.errors import SettingsWarning
from atas.threat import Threat, format_pixels

_SHORT_ADAPTIVE = 2 / 3  # of eps: shorter even where the gradient is zero. The paper has 14/255 at 16/255
_SHORT = 0.2  # of eps, all steps together. The paper has 4/255 at 16/255
_LONG = 4.0  # times eps. The paper has 8/255 at 2/255
_ROUNDING = 1e-6
_TOO_LONG = "a step of 2 eps ends at the edge of the ball from any start"


def warn_of_steps(threat: Threat, size: float, steps: int = 1) -> str | None:
    """Warn of a constant step size with which an attack cannot move, or moves far beyond the ball; return the text."""
    named = f"method.step_size is {_in_eps(threat, size)}"
    remedy = 'leave out method.step_size, or give it as a multiple such as "0.5 eps"'
    if _ratio(threat, size) * steps < _SHORT - _ROUNDING:
        together = f", {steps * size / threat.eps:.2g} eps in {steps} steps" if steps > 1 else ""
        return _warn(f"{named}{together}: the attack hardly moves; {remedy}")
    if _ratio(threat, size) > _LONG + _ROUNDING:
        return _warn(f"{named}: {_TOO_LONG}; {remedy}")
    return None


def warn_of_adaptive_steps(threat: Threat, max_step: float, clip: tuple[float, float] | None = None) -> str | None:
    """Warn of adaptive steps that cannot cross the ball, or that are all too long to adapt; return the text."""
    clipped = clip is not None and clip[1] < max_step
    longest = clip[1] if clip is not None and clipped else max_step
    named = f"method.{'clip ends at' if clipped else 'max_step is'} {_in_eps(threat, longest)}"
    settings = "method.max_step" if clip is None else "method.max_step and method.clip"
    remedy = f'set {settings} to "auto", which follows eps'
    if _ratio(threat, longest) < _SHORT_ADAPTIVE - _ROUNDING:
        return _warn(f"{named}: no step crosses the ball, so the attack is weak; {remedy}")
    if _ratio(threat, longest) > _LONG + _ROUNDING:
        return _warn(f"{named}: {_TOO_LONG}, so longer ones do not adapt; {remedy}")
    return None


def _ratio(threat: Threat, size: float) -> float:
    return size / threat.eps if threat.eps else 1.0


def _in_eps(threat: Threat, size: float) -> str:
    return f"{format_pixels(size)}, {_ratio(threat, size):.3g} times eps ({format_pixels(threat.eps)})"


def _warn(text: str) -> str:
    warnings.warn(text, SettingsWarning, stacklevel=4)  # where the method was created
    return text
