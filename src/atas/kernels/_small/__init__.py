"""The small functions around a network as kernels written by hand: one launch each, and no compiler to start up.

Each is called with the arguments of the function that it stands for, and returns NotImplemented where it does not cover
them: other balls than Linf, images in other precisions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from atas.kernels._small import _ball, _climb, _loss, _views


@functools.cache
def small_functions() -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """Which kernel stands for which function, for `fusing.fused`."""
    from atas import augment, memory, passes, threat  # not at the top: some of these are above the kernels
    from atas.data import resident
    from atas.methods import atas, atta
    from atas.training import engine

    return {
        augment._draw: _views.draw,
        resident._show: _views.show,
        threat._ascend: _ball.ascend,
        threat._random_start: _ball.random_start,
        atta._recall: _ball.recall,
        memory._write: _ball.write,
        atas._climb_and_remember: _climb.climb_and_remember,
        passes.cross_entropy: _loss.cross_entropy,
        passes.cross_entropy_sum: _loss.cross_entropy_sum,
        engine._tally: _loss.tally,
    }
