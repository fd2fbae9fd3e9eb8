"""DELTA's filter: which items leave the device, at a price for its memory."""

import heapq
import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy

from jdelta._src.decision import Decision
from jdelta._src.solver.director import FREE, MOVED, RECOMPUTE, SAVE, Codes, Numbers, code_of
from jdelta._src.solver.problem import Item

_FLOW = 2**30
"""All recompute seconds together, in the integer units of the flow."""


class Corner(NamedTuple):
    """A corner of the lower convex hull of (kept bytes, added seconds)."""

    kept: float
    seconds: float
    codes: Codes


class Exits(NamedTuple):
    """How each item leaves the device if it is not recomputed.

    Attributes:
        seconds: Seconds of its transfers, none hidden; ``inf`` where it may not be moved.
        codes: Its code then.
    """

    seconds: Numbers
    codes: Codes

    @classmethod
    def of(cls, items: Sequence[Item], memories: Collection[Decision]) -> "Exits":
        """The quickest of the moves to some memories."""
        seconds = np.full(len(items), math.inf)
        codes = np.full(len(items), SAVE, dtype=np.int8)
        for index, item in enumerate(items):
            for move in item.moves:
                if move.to in memories and move.seconds < seconds[index]:
                    seconds[index], codes[index] = move.seconds, code_of(move.to)
        return cls(seconds, codes)


class Filter:
    """Chooses what stays when each byte of device memory costs so many seconds.

    DELTA's filter (arXiv 2203.15980) ranks items by bytes times staleness; its knapsack (ACM TACO
    2024, doi:10.1145/3689338) by value density, seconds per byte. A price turns the ranking into a
    threshold: what is worth less than its bytes leaves. With chains the worth of one item depends
    on all others, so the threshold is solved for all of them at once, which is exact: a minimum
    cut, as in project selection (Picard 1976, doi:10.1287/mnsc.22.11.1268). Sweeping the price is
    the Lagrangian relaxation of the capacity (Everett 1963, doi:10.1287/opre.11.3.399). None of
    this is in DELTA.

    Every item is an edge from *in use* to *recomputed*, cut when it is kept, and an edge from
    there to the sink, cut when it is recomputed; recomputing it puts its sources in use.

    Args:
        items: The items.
        exits: How each leaves if it is not recomputed.
        fixed: Codes of items that are decided already; ``FREE`` for all others.
    """

    def __init__(self, items: Sequence[Item], exits: Exits, fixed: Codes):
        size = len(items)
        self.bytes = np.array([item.bytes for item in items], dtype=float)
        self.seconds = np.array([item.seconds for item in items], dtype=float)
        self.holding = np.array([item.holding for item in items], dtype=float)
        self.needed = np.array([item.needed for item in items], dtype=bool)
        self.exits = exits
        self.fixed = np.where(self.bytes == 0, SAVE, fixed)
        self.scale = _FLOW / (float(self.seconds.sum()) or 1.0)
        source, sink = 2 * size, 2 * size + 1
        used = [source if item.needed else index for index, item in enumerate(items)]
        links = [
            (size + index, origin)
            for index, item in enumerate(items)
            for origin in set(item.sources)
            if not items[origin].needed
        ]
        self.tails = np.array([*used, *range(size, 2 * size), *(a for a, _ in links)], dtype=int)
        self.heads = np.array(
            [*range(size, 2 * size), *[sink] * size, *(b for _, b in links)], dtype=int
        )
        self.no_limits = np.full(len(links), _FLOW, dtype=np.int32)

    def corners(self, count: int) -> list[Corner]:
        """Corners of the hull, at most about ``count``, from fewest kept bytes to most.

        Starts from the two ends and asks for the price that joins two neighbours, where the
        triangle that could hide below them is largest. Where several states tie at a price, the
        ones that keep least and most are both found.
        """
        low, high = self._at(math.inf)[0], self._at(0.0)[-1]
        corners = [low, high]
        queue = _gaps(corners)
        while queue and count > 0:
            count -= 1
            _, _, low, high = heapq.heappop(queue)
            price = (low.seconds - high.seconds) / (high.kept - low.kept)
            level = low.seconds + price * low.kept
            inner = [c for c in self._at(price) if low.kept < c.kept < high.kept]
            corners += inner
            if any(c.seconds + price * c.kept < level * (1 - 1e-9) for c in inner):
                for gap in _gaps([low, *inner, high]):
                    heapq.heappush(queue, gap)
        return _descending(corners)

    def _at(self, price: float) -> list[Corner]:
        """The best states at a price, that which keeps least first."""
        worth = price * np.where(self.bytes > 0, self.bytes, 1.0)  # Not 0 times infinity.
        worth = worth + self.holding
        stay = np.minimum(worth, self.exits.seconds)
        stay[self.fixed != FREE] = 0.0
        stay[self.fixed == RECOMPUTE] = np.inf
        code = np.where(self.exits.seconds < worth, self.exits.codes, SAVE)
        corners = [self._corner(*sides, code) for sides in self._cut(stay)]
        return sorted(corners, key=lambda c: (c.kept, c.seconds))

    def _corner(self, used: Any, recomputed: Any, code: Any) -> Corner:
        codes = np.where(used & ~recomputed, code, RECOMPUTE)
        codes = np.where(self.fixed == FREE, codes, self.fixed).astype(np.int8)
        saved = codes == SAVE
        stay = float(self.holding[saved & (self.fixed == FREE)].sum())
        moved = float(self.exits.seconds[(codes >= MOVED) & (self.fixed == FREE)].sum())
        seconds = float(self.seconds[used & recomputed].sum()) + stay + moved
        return Corner(float(self.bytes[saved].sum()), seconds, codes)

    def _cut(self, stay: Numbers) -> list[tuple[Any, Any]]:
        """Items in use and items recomputed, in the cut nearest the source and the sink.

        Args:
            stay: Seconds charged for keeping each item, wherever it is kept.
        """
        size = len(stay)
        costs = np.concatenate([stay, self.seconds]) * self.scale
        limits = np.concatenate(
            [np.minimum(np.ceil(costs), _FLOW).astype(np.int32), self.no_limits]
        )
        shape = (2 * size + 2, 2 * size + 2)
        graph = scipy.sparse.csr_array((limits, (self.tails, self.heads)), shape=shape)
        flow: Any = scipy.sparse.csgraph.maximum_flow(graph, 2 * size, 2 * size + 1)
        left: Any = graph - flow.flow
        left.eliminate_zeros()
        near_source = _reached(left, 2 * size)
        near_sink = ~_reached(left.T.tocsr(), 2 * size + 1)
        return [
            (side[:size] | self.needed, side[size : 2 * size]) for side in (near_source, near_sink)
        ]


def _reached(graph: Any, start: int) -> Any:
    """Which nodes can be reached."""
    reached = np.zeros(graph.shape[0], dtype=bool)
    order = scipy.sparse.csgraph.breadth_first_order(graph, start, return_predecessors=False)
    reached[order] = True
    return reached


def _gaps(corners: Sequence[Corner]) -> list[tuple[float, float, Corner, Corner]]:
    """Neighbours with something between them, each pair behind its rank in the queue."""
    return [
        (-(high.kept - low.kept) * (low.seconds - high.seconds), low.kept, low, high)
        for low, high in itertools.pairwise(corners)
        if low.kept < high.kept and low.seconds > high.seconds
    ]


def _descending(corners: list[Corner]) -> list[Corner]:
    """Those that beat every corner that keeps less."""
    best: list[Corner] = []
    for corner in sorted(corners, key=lambda c: (c.kept, c.seconds)):
        if not best or corner.seconds < best[-1].seconds:
            best.append(corner)
    return best
