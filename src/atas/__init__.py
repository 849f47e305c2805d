"""Fast adversarial training with adaptive step sizes."""

from __future__ import annotations

from atas import methods
from atas._version import __version__
from atas.augment import View, random_view
from atas.errors import AtasError
from atas.methods import ATAS
from atas.threat import L2, Linf, Threat

__all__ = ["ATAS", "L2", "AtasError", "Linf", "Threat", "View", "__version__", "methods", "random_view"]
