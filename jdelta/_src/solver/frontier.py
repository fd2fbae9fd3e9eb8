"""The states that no other state beats in both kept bytes and overhead."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jdelta._src.solver.director import FREE, Codes, Director, Numbers

_REFINED = 64
"""Capacities below this part of the largest are left as they are: nobody trains there."""


class Gap(NamedTuple):
    """What is missing between a state and the next.

    Attributes:
        state: Index of the state.
        width: Bytes to the next state.
        missing: Seconds between the state and the hull just below the next state.
        share: The same as part of the value, the seconds saved by keeping anything.
    """

    state: int
    width: float
    missing: float
    share: float


class Frontier:
    """States from fewest kept bytes to most, each with less overhead than the one before.

    Attributes:
        codes: Decisions, of shape (states, items).
        kept: Saved bytes of each state.
        overhead: Seconds of each state.
        tried: Whether improving a state has been tried.
        hull: Kept bytes and overhead at the corners of the lower convex hull.
    """

    def __init__(self, director: Director, step: float):
        """Make an empty frontier.

        Args:
            director: Prices the states.
            step: Seconds by which a state must beat what keeps no more than it does.
        """
        self.director = director
        self.step = step
        self.codes: Codes = np.zeros((0, len(director.problem.items)), dtype=np.int8)
        self.kept: Numbers = np.zeros(0)
        self.overhead: Numbers = np.zeros(0)
        self.tried: npt.NDArray[np.bool_] = np.zeros(0, dtype=bool)
        self.hull: tuple[Numbers, Numbers] = self.kept, self.overhead

    def add(self, wishes: Sequence[Codes], prices: Sequence[float] = ()) -> None:
        """Add states, and drop those that are beaten.

        Args:
            wishes: Codes of each state, for the director.
            prices: What a byte is worth in each state, in seconds; by default nothing.
        """
        if not wishes:
            return
        worth = np.array(prices or [0.0] * len(wishes))
        codes, kept, overhead = self.director.direct(np.array(wishes), worth)
        codes = np.concatenate([self.codes, codes])
        kept, overhead = np.append(self.kept, kept), np.append(self.overhead, overhead)
        tried = np.append(self.tried, np.zeros(len(wishes), dtype=bool))
        order = np.lexsort((overhead, kept))
        rest = order[descending(overhead[order], self.step)]
        self.codes, self.kept, self.overhead = codes[rest], kept[rest], overhead[rest]
        self.tried = tried[rest]
        self.hull = self._hull()

    def price(self, state: int) -> float:
        """Seconds that one more byte saves on the hull, just above a state."""
        kept, overhead = self.hull
        corner = min(int(np.searchsorted(kept, self.kept[state], side="right")), len(kept) - 1)
        rise = overhead[corner - 1] - overhead[corner]
        return float(rise / (kept[corner] - kept[corner - 1]))

    def _hull(self) -> tuple[Numbers, Numbers]:
        hull: list[tuple[float, float]] = []
        for x, y in zip(self.kept.tolist(), self.overhead.tolist(), strict=True):
            while len(hull) > 1 and _above(hull[-2], hull[-1], (x, y)):
                hull.pop()
            hull.append((x, y))
        kept, overhead = np.array(hull).T
        return kept, overhead

    def gaps(self, count: int, least: float) -> list[Gap]:
        """States not tried yet that leave most on the table for the capacities just above them.

        Args:
            count: How many at most.
            least: Part of the value that must be missing.

        Returns:
            The gaps above them, the worst first: that which costs most over all capacities.
        """
        width = np.diff(self.kept)
        bound = np.interp(self.kept, *self.hull)[1:]
        missing = self.overhead[:-1] - bound
        share = missing / np.maximum(self.overhead[0] - bound, self.step)
        share[self.tried[:-1] | (self.kept[1:] * _REFINED < self.kept[-1])] = 0.0
        worst = np.argsort(-share * width, kind="stable")[:count]
        return [
            Gap(int(state), float(width[state]), float(missing[state]), float(share[state]))
            for state in worst[share[worst] > least]
        ]

    def sides(self, gap: Gap) -> list[Codes]:
        """Codes of the items that do not fit into a gap, below it and above it; others are free."""
        small = self.director.bytes < gap.width
        return [np.where(small, FREE, self.codes[gap.state + side]) for side in (0, 1)]

    def at(self, capacities: Numbers) -> Numbers:
        """Overhead of the best state within each capacity; ``-inf`` where there is none."""
        best = np.searchsorted(self.kept, capacities, side="right") - 1
        return np.where(best < 0, -np.inf, self.overhead[best])


def descending(values: Numbers, step: float) -> npt.NDArray[np.bool_]:
    """Which values are less, by more than ``step``, than every value before them."""
    before = np.minimum.accumulate(np.append(np.inf, values))[:-1]
    return values < before - step


def _above(a: tuple[float, float], b: tuple[float, float], c: tuple[float, float]) -> bool:
    """Whether ``b`` lies on or above the line from ``a`` to ``c``."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])
