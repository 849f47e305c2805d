"""The steps of the searches as kernels written by hand: what surrounds the network, in a few launches.

Each is called with the arguments of the function that it stands for, and returns NotImplemented where it does not cover
them: other balls than Linf, images in other precisions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from atas.attacks import _apgd as apgd
from atas.attacks import _fab as fab
from atas.attacks import _lanes as lanes
from atas.attacks import _logits as logits
from atas.attacks import _pgd as pgd
from atas.attacks import _square as square
from atas.kernels._attacks import _apgd, _fab, _lanes, _logits, _pgd, _square


@functools.cache
def attack_functions() -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """Which kernel stands for which function, for `fusing.fused`."""
    return {
        lanes.started: _lanes.started,
        logits._correct: _logits.correct,
        pgd._move: _pgd.move,
        apgd._losses: _logits.losses,
        apgd._move: _apgd.move,
        square._squares: _square.squares,
        square._margin: _logits.margin,
        square._keep: _square.keep,
        fab._lead: _logits.lead,
        fab._ahead: _fab.ahead,
        fab._keep: _fab.keep,
    }
