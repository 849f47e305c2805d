"""Square Attack: black-box random search with square windows (Andriushchenko et al., 2020).

A query proposes a perturbation that differs from the best one in a square window at a random position. The search
accepts it if the margin of the label over the other classes falls. The windows shrink with the number of queries. For
Linf every channel of the window moves by eps, up or down at random. For L2 the window gets a pattern with a positive
and a negative half; its budget comes from another window, which is set to zero.

As in AutoAttack, the loss is the margin. Three details differ from AutoAttack's code: a window may lie at every
position, where theirs excludes the last row and column; the start counts as a query; and each example has its own
position (for Linf also its own signs), where theirs has one per batch.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from atas.attacks.base import SearchAttack, as_threat
from atas.attacks.losses import goal_margin, resists
from atas.attacks.search import LogitsFunction, Slots, expand_like, where_write
from atas.core.arguments import check_count, check_fields
from atas.core.dispatch import fast_op
from atas.core.rng import CounterRNG, Stream
from atas.errors import UsageError
from atas.threat import L2, Linf, Threat, l2_norm

# For 10,000 queries: after each of these, the fraction of pixels that a query changes is halved.
_HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
_MIN_SIDE = 3  # the pattern of a smaller window would be little more than one sign
_TILES = 5  # tiles along the image's shorter side at the start for L2
_TINY = 1e-12


@dataclass(frozen=True)
class Square(SearchAttack):
    """Square Attack: random search with square windows, without gradients.

    Paper: "Square Attack: a query-efficient black-box adversarial attack via random search" (Andriushchenko et al.,
    2020), https://arxiv.org/abs/1912.00049.
    Distance: Linf, L2.

    The schedule of window sizes is made for 10,000 queries. AutoAttack uses the first half of it for its 5,000 queries.
    With `rescale_schedule` it is rescaled to the number of queries, and the last windows have one pixel.

    Args:
        threat: the threat model, such as `atas.Linf(8/255)`; a plain number is the eps of Linf. An attack without one
            gets it at the call, or from `atas.evaluate`.
        queries: number of queries (default 5000).
        p_init: fraction of the pixels that the first queries change (default 0.8).
        rescale_schedule: rescale the schedule of window sizes to the number of queries (default False).

    Shape:
        - model: maps images (N, C, H, W) in [0, 1] to logits (N, classes)
        - x: (N, C, H, W), float in [0, 1]
        - y: (N,), integers from 0 to classes - 1
        - output: like x; the image itself if it is misclassified already or the search does not succeed

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    >>> x, y = torch.rand(2, 1, 4, 4), torch.tensor([0, 2])
    >>> attack = Square(8 / 255, queries=100)
    >>> x_adv = attack(model, x, y)
    >>> Square().settings(Linf(8 / 255))["start"]
    'vertical stripes'
    """

    threat: Threat | float | None = None
    _: KW_ONLY
    queries: int = 5000
    p_init: float = 0.8
    rescale_schedule: bool = False
    name: ClassVar[str] = "square"
    queries_per_step: ClassVar[int] = 1
    backward_passes: ClassVar[int] = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "threat", as_threat(self.threat))
        check_fields(self)
        check_count("queries", self.queries)
        if not 0 < self.p_init <= 1:
            raise UsageError(f"p_init is a fraction of the pixels, above 0 and at most 1; got {self.p_init}")

    @property
    def steps(self) -> int:
        """The number of queries."""
        return self.queries

    def num_targets(self, num_classes: int) -> int:
        """Return 0: the search is untargeted."""
        return 0

    def settings(self, threat: Threat) -> dict[str, Any]:
        """Return the queries, the first fraction of pixels, its schedule, and the start."""
        return {
            "queries": self.queries,
            "p_init": self.p_init,
            "stretched": self.rescale_schedule,
            "loss": "margin",
            "restarts": 1,
            "start": "vertical stripes" if isinstance(threat.unmasked, Linf) else "tiles",
        }

    def init_state(self, slots: Slots, threat: Threat, num_classes: int, seed: int) -> SquareState:
        """Allocate the state of the slots."""
        if not isinstance(threat.unmasked, Linf | L2):
            raise UsageError(f"{self.name} supports the norms linf and l2; got {threat!r}")
        return SquareState(self, slots, threat, seed)

    def pixel_fraction(self, query: int) -> float:
        """Return the fraction of pixels that a query changes; query 0 is the start, query 1 the first with a window.

        >>> [Square(queries=10_000).pixel_fraction(query) for query in (1, 11, 12, 10_000)]
        [0.8, 0.8, 0.4, 0.0015625]
        """
        elapsed = int((query - 1) / self.queries * 10_000) if self.rescale_schedule else query - 1
        return self.p_init / 2 ** bisect.bisect_left(_HALVINGS, elapsed)

    def side_lengths(self, height: int, width: int) -> list[float]:
        """Return, for each query, the square root of the number of pixels that it changes."""
        return [math.sqrt(self.pixel_fraction(query) * height * width) for query in range(self.queries)]


class SquareState:
    """The state of Square Attack: the best point so far is the slot's `point`."""

    def __init__(self, search: Square, slots: Slots, threat: Threat, seed: int) -> None:
        self._slots, self._queries, self._threat = slots, search.queries, threat
        is_linf = isinstance(threat.unmasked, Linf)
        self._propose = (LinfProposal if is_linf else L2Proposal)(search, slots, threat.eps, seed)
        self._margin = torch.zeros(len(slots), dtype=slots.x.dtype, device=slots.x.device)

    @torch.no_grad()
    def step(self, model: LogitsFunction) -> None:
        """Make one query in every running slot."""
        slots = self._slots
        proposal = restrict_proposal(self._threat, self._propose(slots), slots.x)
        output = model(proposal)
        margin = goal_margin(output, slots.y, targeted=slots.targeted)
        is_correct = resists(output, slots.y, targeted=slots.targeted)
        square_update(self._queries, slots, self._margin, proposal, margin, is_correct)


def restrict_proposal(threat: Threat, proposal: Tensor, x: Tensor) -> Tensor:
    """Return a proposal that changes only pixels that may change; for L2 they take over the budget of the others."""
    if threat.unmasked is threat:
        return proposal
    change = threat.hold(proposal, x) - x
    if isinstance(threat.unmasked, L2):
        change = change * expand_like(threat.eps / (l2_norm(change) + _TINY), x)
    return threat.project(x + change, x)


@fast_op
def square_update(
    queries: int, slots: Slots, least: Tensor, proposal: Tensor, margin: Tensor, is_correct: Tensor
) -> None:
    """Accept the proposals that lower the margin, in the running slots; any margin is lower than NaN."""
    running = slots.running()
    better = (slots.iteration == 0) | (margin < least) | least.isnan() | ~is_correct
    where_write(least, margin.to(least.dtype), running & better)
    where_write(slots.point, proposal, running & better)
    slots.broken.logical_or_(running & ~is_correct)
    slots.iteration.add_(running)
    slots.done.logical_or_(running & (slots.iteration >= queries))


class LinfProposal:
    """Proposals for Linf: vertical stripes, then windows in which every channel moves up or down by eps."""

    def __init__(self, search: Square, slots: Slots, eps: float, seed: int) -> None:
        self._eps, self._seed = eps, seed
        height, width = slots.x.shape[2:]
        sides = [min(max(round(length), 1), height, width) for length in search.side_lengths(height, width)]
        self._sides = torch.tensor(sides, device=slots.x.device)

    def __call__(self, slots: Slots) -> Tensor:
        """Return the next point of each slot."""
        return linf_proposal(self._eps, self._seed, slots, self._sides)


@fast_op
def linf_proposal(eps: float, seed: int, slots: Slots, sides: Tensor) -> Tensor:
    """Return the next point of each slot for Linf; `sides` holds the window side of each query."""
    x, fresh = slots.x, expand_like(slots.iteration == 0, slots.x)
    channels, height, width = x.shape[1:]
    draw = CounterRNG(seed, slots.iteration, slots.index)
    stripes = draw.uniform(Stream.START, (channels, 1, width))
    position, numbers = draw.uniform(Stream.PROPOSAL, (2 + channels,)).split((2, channels), 1)
    window = Window.place_at(position, sides[slots.iteration.clamp_max(len(sides) - 1)], height, width)
    signs = _signs(torch.where(fresh, stripes, numbers[:, :, None, None])).to(x.dtype)
    return torch.where(fresh | window.pixels, (x + eps * signs).clamp(0, 1), slots.point)


class L2Proposal:
    """Proposals for L2: tiles over the whole image, then windows that take budget from other windows.

    The perturbation keeps its norm. If it is clipped at 0 or 1, the next proposal uses the remaining budget.
    """

    def __init__(self, search: Square, slots: Slots, eps: float, seed: int) -> None:
        self._eps, self._seed = eps, seed
        height, width = slots.x.shape[2:]
        # A window with an odd side has a centre.
        sides = [max(round(length), _MIN_SIDE) // 2 * 2 + 1 for length in search.side_lengths(height, width)]
        sides = [min(side, height, width) for side in sides]
        sizes = sorted(set(sides))
        patterns = [F.pad(_pattern(side), (0, sizes[-1] - side, 0, sizes[-1] - side)) for side in sizes]
        tiles, tile_index = _tiles(height, width)
        device = slots.x.device
        self._tables = L2Tables(
            sides=torch.tensor(sides, device=device),
            pattern_index=torch.tensor([sizes.index(side) for side in sides], device=device),
            patterns=torch.stack(patterns).to(slots.x),
            tiles=tiles.to(slots.x),
            tile_index=tile_index.to(device),
            num_tiles=int(tile_index.max()) + 1,
        )

    def __call__(self, slots: Slots) -> Tensor:
        """Return the next point of each slot."""
        return l2_proposal(self._eps, self._seed, slots, self._tables)


@dataclass(frozen=True)
class L2Tables:
    """Tables that all slots share."""

    sides: Tensor
    """The window side of each query."""
    pattern_index: Tensor
    """The index of each query's pattern in `patterns`."""
    patterns: Tensor
    """The pattern of each window size, padded to the largest size."""
    tiles: Tensor
    """The start without signs, with all tiles upright and with all tiles transposed (2, H, W)."""
    tile_index: Tensor
    """The tile of each pixel (H, W)."""
    num_tiles: int
    """The number of tiles."""


@fast_op
def l2_proposal(eps: float, seed: int, slots: Slots, tables: L2Tables) -> Tensor:
    """Return the next point of each slot for L2."""
    x, last = slots.x, len(tables.sides) - 1
    channels, height, width = x.shape[1:]
    draw = CounterRNG(seed, slots.iteration, slots.index)
    numbers = draw.uniform(Stream.START, (1 + channels, tables.num_tiles))[:, :, tables.tile_index]
    orientation, numbers = numbers.split((1, channels), 1)
    start = torch.where(orientation < 0.5, tables.tiles[1], tables.tiles[0]) * _signs(numbers).to(x.dtype)

    query = slots.iteration.clamp_max(last)
    side, size_index = tables.sides[query], tables.pattern_index[query]
    position, other_position, orientation, numbers = draw.uniform(Stream.PROPOSAL, (5 + channels,)).split(
        (2, 2, 1, channels), 1
    )
    window = Window.place_at(position, side, height, width)
    other = Window.place_at(other_position, side, height, width)
    pattern = window.filled(tables.patterns, size_index, orientation < 0.5) * _signs(numbers[:, :, None, None]).to(
        x.dtype
    )
    change = torch.where(
        expand_like(slots.iteration == 0, x), start, _move_budget(eps, slots.point - x, window, other, pattern)
    )
    return (x + change * expand_like(eps / (l2_norm(change) + _TINY), x)).clamp(0, 1)


def _move_budget(eps: float, change: Tensor, window: Window, other: Window, pattern: Tensor) -> Tensor:
    """Return the change with the budget of both windows, and the unused budget, in the first window.

    There the old change and the pattern, each scaled to norm 1 in every channel, are added.
    """
    old = change * window.pixels
    new = pattern + old / (_channel_norm(old) + _TINY)
    unused = (eps**2 - _channel_norm(change).square().sum(1, keepdim=True)).clamp_min(0)
    budget = _channel_norm(change * (window.pixels | other.pixels)).square() + unused / change.shape[1]
    new = new * (budget.sqrt() / (_channel_norm(new) + _TINY))
    return torch.where(window.pixels, new, change * ~other.pixels)


@dataclass(frozen=True)
class Window:
    """A square window in each image of a batch."""

    row_offset: Tensor
    """The offset of each row (B, H, 1) from the window's first row; 0 outside."""
    column_offset: Tensor
    """The offset of each column (B, 1, W) from the window's first column; 0 outside."""
    pixels: Tensor
    """Whether each pixel (B, 1, H, W) is inside."""

    @staticmethod
    def place_at(numbers: Tensor, side: Tensor, height: int, width: int) -> Window:
        """Return windows at random positions, from numbers (B, 2) that are uniform in [0, 1)."""
        row_offset, rows = _offsets(numbers[:, 0], side, height)
        column_offset, columns = _offsets(numbers[:, 1], side, width)
        return Window(
            row_offset[:, :, None], column_offset[:, None, :], rows[:, None, :, None] & columns[:, None, None, :]
        )

    def filled(self, patterns: Tensor, size_index: Tensor, transposed: Tensor) -> Tensor:
        """Return the pattern of the window's size (B, 1, H, W), upright or transposed, and 0 outside."""
        transposed = transposed[:, :, None]
        row, column = (
            torch.where(transposed, self.column_offset, self.row_offset),
            torch.where(transposed, self.row_offset, self.column_offset),
        )
        return patterns[size_index[:, None, None], row, column].unsqueeze(1) * self.pixels


def _offsets(number: Tensor, side: Tensor, extent: int) -> tuple[Tensor, Tensor]:
    """Return the offset of each row or column in a window at a random position, and whether it is inside."""
    first = (number * (extent - side + 1)).long()
    offset = torch.arange(extent, device=first.device) - first[:, None]
    inside = (offset >= 0) & (offset < side[:, None])
    return offset * inside, inside


def _signs(numbers: Tensor) -> Tensor:
    """Return 1 or -1 for numbers that are uniform in [0, 1)."""
    return 1 - 2 * (numbers < 0.5).to(numbers.dtype)


def _channel_norm(images: Tensor) -> Tensor:
    """Return the Euclidean norm of each channel (B, C, 1, 1)."""
    return torch.linalg.vector_norm(images, dim=(2, 3), keepdim=True)


def _pattern(side: int) -> Tensor:
    """Return a square of norm 1 with a positive upper and a negative lower half, in float64."""
    pattern = torch.cat([_bump(side // 2, side), -_bump(side - side // 2, side)])
    return pattern / torch.linalg.vector_norm(pattern)


def _bump(height: int, width: int) -> Tensor:
    """Return a rectangle of norm 1 with its peak at the centre: a sum of squares, 1/k^2 high and 2k - 1 wide."""
    rows, columns = (torch.arange(extent) - extent // 2 for extent in (height, width))
    distance = torch.maximum(rows.abs()[:, None], columns.abs())
    heights = torch.arange(1, max(height, width) // 2 + 2, dtype=torch.float64) ** -2
    bump = heights.flip(0).cumsum(0).flip(0)[distance]
    return bump / torch.linalg.vector_norm(bump).clamp_min(_TINY)


def _tiles(height: int, width: int) -> tuple[Tensor, Tensor]:
    """Return tiled patterns, upright and transposed (2, H, W), and the tile of each pixel (H, W).

    Pixels at the edges that no tile covers are zero.
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
