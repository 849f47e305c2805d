"""Square Attack: random search by squares, which asks for the model's output alone (Andriushchenko et al., 2020).

A query proposes another perturbation, which differs from the best one so far in a square window at a random place, and
is kept if the margin of the label over the other classes falls. The windows shrink with the number of queries. For Linf
every channel of the window goes to the end of the ball, up or down, at random. For L2 the window gets more of a pattern
with a positive and a negative half, and the budget for it comes from another window, which is emptied.

As in AutoAttack, the loss is the margin. Three things differ from AutoAttack's code: a window may lie at every place,
where that leaves out the last row and column; the start counts as a query; and each example has a place (for Linf also
signs) of its own, not its batch's.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from atas.attacks.losses import correct
from atas.attacks.losses import margin as label_margin
from atas.attacks.search import LogitsFunction, Slots, expand_like, where_write
from atas.core.dispatch import fast_op
from atas.core.rng import CounterRNG, Stream
from atas.errors import UsageError
from atas.threat import L2, Linf, Threat, l2_norm

# Of 10,000 queries: after each of these, the share of pixels that a query changes is halved.
_HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
_MIN_SIDE = 3  # the pattern of a smaller window would be hardly more than one sign
_TILES = 5  # the start for L2 has so many tiles along the image's shorter side
_TINY = 1e-12


@dataclass(frozen=True)
class Square:
    """The settings of Square Attack. The schedule by which windows shrink is made for 10,000 queries. Stretched to
    those there are, it comes to windows of a pixel; AutoAttack does not stretch it, and so ends half way.

    >>> Square().settings(Linf(8 / 255))["start"]
    'vertical stripes'
    """

    queries: int = 5000
    p_init: float = 0.8
    rescale_schedule: bool = False
    name: ClassVar[str] = "square"
    queries_per_step: ClassVar[int] = 1
    backward_passes: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if self.queries < 1:
            raise UsageError(f"queries must be at least 1; got {self.queries}")
        if not 0 < self.p_init <= 1:
            raise UsageError(f"p_init is a share of the pixels, above 0 and at most 1; got {self.p_init}")

    @property
    def steps(self) -> int:
        """One query a step."""
        return self.queries

    def num_targets(self, num_classes: int) -> int:
        """Any other class will do."""
        return 0

    def settings(self, threat: Threat) -> dict[str, Any]:
        """Queries, the first share of pixels, how it falls, and the start."""
        return {
            "queries": self.queries,
            "p_init": self.p_init,
            "stretched": self.rescale_schedule,
            "loss": "margin",
            "restarts": 1,
            "start": "vertical stripes" if isinstance(threat, Linf) else "tiles",
        }

    def init_state(self, slots: Slots, threat: Threat, num_classes: int, seed: int) -> SquareState:
        """Allocate what the slots need."""
        if not isinstance(threat, Linf | L2):
            raise UsageError(f"{self.name} knows the norms linf and l2; got {threat!r}")
        return SquareState(self, slots, threat, seed)

    def pixel_fraction(self, query: int) -> float:
        """The share of pixels that a query changes; query 0 is the start, and query 1 the first with a window.

        >>> [Square(queries=10_000).pixel_fraction(query) for query in (1, 11, 12, 10_000)]
        [0.8, 0.8, 0.4, 0.0015625]
        """
        elapsed = int((query - 1) / self.queries * 10_000) if self.rescale_schedule else query - 1
        return self.p_init / 2 ** bisect.bisect_left(_HALVINGS, elapsed)

    def side_lengths(self, height: int, width: int) -> list[float]:
        """For each query, the root of the number of pixels that it changes."""
        return [math.sqrt(self.pixel_fraction(query) * height * width) for query in range(self.queries)]


class SquareState:
    """Square Attack under way. The best point of each slot so far is the slot's `point`."""

    def __init__(self, search: Square, slots: Slots, threat: Threat, seed: int) -> None:
        self._slots, self._queries = slots, search.queries
        self._propose = (LinfProposal if isinstance(threat, Linf) else L2Proposal)(search, slots, threat.eps, seed)
        self._margin = torch.zeros(len(slots), dtype=slots.x.dtype, device=slots.x.device)

    @torch.no_grad()
    def step(self, model: LogitsFunction) -> None:
        """One query of every slot."""
        slots = self._slots
        proposal = self._propose(slots)
        output = model(proposal)
        margin, is_correct = label_margin(output, slots.y), correct(output, slots.y)
        square_update(self._queries, slots, self._margin, proposal, margin, is_correct)


@fast_op
def square_update(
    queries: int, slots: Slots, least: Tensor, proposal: Tensor, margin: Tensor, is_correct: Tensor
) -> None:
    """Keep the proposals that are better than what there was, in the running slots; NaN is the worst of all."""
    running = slots.running()
    better = (slots.iteration == 0) | (margin < least) | least.isnan() | ~is_correct
    where_write(least, margin.to(least.dtype), running & better)
    where_write(slots.point, proposal, running & better)
    slots.broken.logical_or_(running & ~is_correct)
    slots.iteration.add_(running)
    slots.done.logical_or_(running & (slots.iteration >= queries))


class LinfProposal:
    """What is proposed for Linf: vertical stripes, then windows, in which every channel goes up or down by eps."""

    def __init__(self, search: Square, slots: Slots, eps: float, seed: int) -> None:
        self._eps, self._seed = eps, seed
        height, width = slots.x.shape[2:]
        sides = [min(max(round(length), 1), height, width) for length in search.side_lengths(height, width)]
        self._sides = torch.tensor(sides, device=slots.x.device)

    def __call__(self, slots: Slots) -> Tensor:
        """The point that each slot asks about next."""
        return linf_proposal(self._eps, self._seed, slots, self._sides)


@fast_op
def linf_proposal(eps: float, seed: int, slots: Slots, sides: Tensor) -> Tensor:
    """The next point of each slot for Linf; `sides` has the side of each query's window."""
    x, fresh = slots.x, expand_like(slots.iteration == 0, slots.x)
    channels, height, width = x.shape[1:]
    draw = CounterRNG(seed, slots.iteration, slots.index)
    stripes = draw.uniform(Stream.START, (channels, 1, width))
    place, numbers = draw.uniform(Stream.PROPOSAL, (2 + channels,)).split((2, channels), 1)
    window = Window.place_at(place, sides[slots.iteration.clamp_max(len(sides) - 1)], height, width)
    signs = _signs(torch.where(fresh, stripes, numbers[:, :, None, None])).to(x.dtype)
    return torch.where(fresh | window.pixels, (x + eps * signs).clamp(0, 1), slots.point)


class L2Proposal:
    """What is proposed for L2: tiles all over the image, then windows that take budget from others.

    The change keeps its norm. Where it is cut at 0 or 1, the next proposal makes up for what it lacks.
    """

    def __init__(self, search: Square, slots: Slots, eps: float, seed: int) -> None:
        self._eps, self._seed = eps, seed
        height, width = slots.x.shape[2:]
        # An odd window has a middle.
        sides = [max(round(length), _MIN_SIDE) // 2 * 2 + 1 for length in search.side_lengths(height, width)]
        sides = [min(side, height, width) for side in sides]
        kinds = sorted(set(sides))
        patterns = [F.pad(_pattern(side), (0, kinds[-1] - side, 0, kinds[-1] - side)) for side in kinds]
        tiles, places = _tiles(height, width)
        device = slots.x.device
        self._tables = L2Tables(
            sides=torch.tensor(sides, device=device),
            pattern_index=torch.tensor([kinds.index(side) for side in sides], device=device),
            patterns=torch.stack(patterns).to(slots.x),
            tiles=tiles.to(slots.x),
            tile_index=places.to(device),
            num_tiles=int(places.max()) + 1,
        )

    def __call__(self, slots: Slots) -> Tensor:
        """The point that each slot asks about next."""
        return l2_proposal(self._eps, self._seed, slots, self._tables)


@dataclass(frozen=True)
class L2Tables:
    """What is the same for all slots."""

    sides: Tensor
    """The side of each query's window."""
    pattern_index: Tensor
    """The number of each query's pattern."""
    patterns: Tensor
    """The pattern of each size of window, in the corner of a square as large as the largest."""
    tiles: Tensor
    """The start without its signs, with all tiles upright and with all lying (2, H, W)."""
    tile_index: Tensor
    """The number of the tile that each pixel (H, W) belongs to."""
    num_tiles: int
    """How many tiles there are."""


@fast_op
def l2_proposal(eps: float, seed: int, slots: Slots, tables: L2Tables) -> Tensor:
    """The next point of each slot for L2."""
    x, last = slots.x, len(tables.sides) - 1
    channels, height, width = x.shape[1:]
    draw = CounterRNG(seed, slots.iteration, slots.index)
    numbers = draw.uniform(Stream.START, (1 + channels, tables.num_tiles))[:, :, tables.tile_index]
    lying, numbers = numbers.split((1, channels), 1)
    start = torch.where(lying < 0.5, tables.tiles[1], tables.tiles[0]) * _signs(numbers).to(x.dtype)

    query = slots.iteration.clamp_max(last)
    side, kind = tables.sides[query], tables.pattern_index[query]
    here, there, lying, numbers = draw.uniform(Stream.PROPOSAL, (5 + channels,)).split((2, 2, 1, channels), 1)
    window, other = Window.place_at(here, side, height, width), Window.place_at(there, side, height, width)
    pattern = window.filled(tables.patterns, kind, lying < 0.5) * _signs(numbers[:, :, None, None]).to(x.dtype)
    change = torch.where(
        expand_like(slots.iteration == 0, x), start, _move_budget(eps, slots.point - x, window, other, pattern)
    )
    return (x + change * expand_like(eps / (l2_norm(change) + _TINY), x)).clamp(0, 1)


def _move_budget(eps: float, change: Tensor, window: Window, other: Window, pattern: Tensor) -> Tensor:
    """The budget of two windows and what the whole lacks of it, all in the first, where the pattern joins the change.

    The change that was there and the pattern count alike: both are first brought to a norm of 1, in every channel.
    """
    there = change * window.pixels
    new = pattern + there / (_channel_norm(there) + _TINY)
    lack = (eps**2 - _channel_norm(change).square().sum(1, keepdim=True)).clamp_min(0)
    budget = _channel_norm(change * (window.pixels | other.pixels)).square() + lack / change.shape[1]
    new = new * (budget.sqrt() / (_channel_norm(new) + _TINY))
    return torch.where(window.pixels, new, change * ~other.pixels)


@dataclass(frozen=True)
class Window:
    """A square window in each image of a batch."""

    row_offset: Tensor
    """How far each row (B, H, 1) is below the window's first; 0 outside."""
    column_offset: Tensor
    """How far each column (B, 1, W) is to the right of the window's first; 0 outside."""
    pixels: Tensor
    """Which pixels (B, 1, H, W) are inside."""

    @staticmethod
    def place_at(numbers: Tensor, side: Tensor, height: int, width: int) -> Window:
        """At a random place, by two numbers (B, 2) that are uniform between 0 and 1."""
        down, rows = _offsets(numbers[:, 0], side, height)
        right, columns = _offsets(numbers[:, 1], side, width)
        return Window(down[:, :, None], right[:, None, :], rows[:, None, :, None] & columns[:, None, None, :])

    def filled(self, patterns: Tensor, kind: Tensor, lying: Tensor) -> Tensor:
        """A pattern of its size (B, 1, H, W), upright or lying on its side, and 0 outside."""
        lying = lying[:, :, None]
        row, column = (
            torch.where(lying, self.column_offset, self.row_offset),
            torch.where(lying, self.row_offset, self.column_offset),
        )
        return patterns[kind[:, None, None], row, column].unsqueeze(1) * self.pixels


def _offsets(number: Tensor, side: Tensor, extent: int) -> tuple[Tensor, Tensor]:
    """Where each row, or column, is in a window at a random place, and whether it is inside."""
    first = (number * (extent - side + 1)).long()
    offset = torch.arange(extent, device=first.device) - first[:, None]
    inside = (offset >= 0) & (offset < side[:, None])
    return offset * inside, inside


def _signs(numbers: Tensor) -> Tensor:
    """1 or -1, of numbers that are uniform between 0 and 1."""
    return 1 - 2 * (numbers < 0.5).to(numbers.dtype)


def _channel_norm(images: Tensor) -> Tensor:
    """The Euclidean norm of each channel (B, C, 1, 1)."""
    return torch.linalg.vector_norm(images, dim=(2, 3), keepdim=True)


def _pattern(side: int) -> Tensor:
    """A square with a positive bump in its upper half and a negative one in its lower half, of norm 1, float64."""
    pattern = torch.cat([_bump(side // 2, side), -_bump(side - side // 2, side)])
    return pattern / torch.linalg.vector_norm(pattern)


def _bump(height: int, width: int) -> Tensor:
    """A rectangle of norm 1 that falls off from its middle: the sum of centred squares, 1/k^2 high and 2k - 1 wide."""
    down, right = (torch.arange(extent) - extent // 2 for extent in (height, width))
    distance = torch.maximum(down.abs()[:, None], right.abs())
    heights = torch.arange(1, max(height, width) // 2 + 2, dtype=torch.float64) ** -2
    bump = heights.flip(0).cumsum(0).flip(0)[distance]
    return bump / torch.linalg.vector_norm(bump).clamp_min(_TINY)


def _tiles(height: int, width: int) -> tuple[Tensor, Tensor]:
    """Patterns side by side over an image, upright and lying (2, H, W), and the number of each pixel's tile (H, W).

    What they leave uncovered at the edges is zero.
    """
    side = max(min(height, width) // _TILES, 1)
    down, across = height // side, width // side
    top, left = (height - down * side) // 2, (width - across * side) // 2
    edges = (left, width - across * side - left, top, height - down * side - top)
    pattern = _pattern(side)
    tiles = torch.stack([upright.repeat(down, across) for upright in (pattern, pattern.T)])
    numbers = torch.arange(down * across).view(down, across)
    numbers = numbers.repeat_interleave(side, 0).repeat_interleave(side, 1)
    return F.pad(tiles, edges), F.pad(numbers, edges)
