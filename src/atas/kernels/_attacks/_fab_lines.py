"""FAB's linear problem: how far coordinates go until a linear function is zero, without the sort that
`_fab.to_boundary` makes.

What the function has lost at pace t is the least of many lines, so it is concave: from a t that is too small, the line
that holds there leads to another that is not too large. Beginning at 0 this goes up from line to line, passing over
most, and comes to rest on the right one. A coordinate that has met its end is never on its way again, so there is a
last step; it is usually one of the first ten.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def falls(normal, value):  # type: ignore[no-untyped-def]
    """Whether a coordinate has to fall to take the function towards zero."""
    return tl.where(value > 0, normal, -normal) > 0


@triton.jit
def room_of(point, normal, value):  # type: ignore[no-untyped-def]
    """How far each coordinate can go towards the function's zero."""
    return tl.where(falls(normal, value), point, 1 - point)


@triton.jit
def reached(t, goal, rate, ended):  # type: ignore[no-untyped-def]
    """Where the line that holds at t reaches the goal; infinite if all coordinates have met their ends by t.

    `rate` is the sum of the slopes of the others, `ended` what the function has lost by those that have.
    """
    return tl.maximum(t, tl.where(rate > 0, (goal - ended) / tl.where(rate > 0, rate, 1.0), float("inf")))
