"""DELTA's director: how each item that leaves the device comes back, and what that costs."""

from typing import Final

import numpy as np
import numpy.typing as npt

from jdelta._decision import Decision
from jdelta._problem import Problem

Codes = npt.NDArray[np.int8]
"""Decisions as small integers, indices of ``DECISIONS``."""

Numbers = npt.NDArray[np.float64]

DECISIONS: Final = (Decision.RECOMPUTE, Decision.SAVE, Decision.OFFLOAD)
RECOMPUTE, SAVE, OFFLOAD = range(3)

FREE = -1
"""In place of the code of an item that is still to be decided."""


class Director:
    """Completes and prices many states at once, one row of codes each.

    DELTA's director (arXiv 2203.15980) looks at one item at a time: recompute it when its transfer
    takes longer, offload it otherwise. Transfers share the seconds that compute hides, though, in
    each direction. Here these go first to the items that free most bytes for each second on the
    link.

    Args:
        problem: Its items, host capacity (bytes) and hidden seconds; the capacity is not looked at.
    """

    def __init__(self, problem: Problem):
        self.problem = problem
        items = problem.items
        self.bytes = np.array([item.bytes for item in items], dtype=float)
        movable = [i for i, item in enumerate(items) if item.offloadable and item.bytes > 0]
        self.order = sorted(
            movable, key=lambda i: (items[i].seconds_out + items[i].seconds_in) / items[i].bytes
        )

    def direct(self, wishes: Codes, prices: Numbers) -> tuple[Codes, Numbers, Numbers]:
        """Turn wishes into decisions that obey the host capacity, and price them.

        What the host has no room for is saved instead. Then saved items are offloaded, for as long
        as the host has room, where their bytes are worth the seconds that are not hidden.

        Args:
            wishes: Codes, of shape (states, items).
            prices: What a byte is worth in each state, in seconds; at 0 no second is exposed.

        Returns:
            Decisions, in the same shape; saved bytes and overhead seconds of each state.
        """
        codes = np.array(wishes.T, order="C")
        exposed = self._transfer(codes, prices * (1 - 1e-9))  # At equal cost a wish is a wish.
        kept, again = self._recompute(codes)
        return np.ascontiguousarray(codes.T), kept, again + exposed

    def _transfer(self, codes: Codes, prices: Numbers) -> Numbers:
        """Decide in place what crosses the link; the seconds of it that are exposed."""
        states = codes.shape[1]
        out = np.full(states, -float(self.problem.hidden_out))
        into = np.full(states, -float(self.problem.hidden_in))
        host = np.full(states, float(self.problem.host_capacity))
        bare = np.zeros(states)
        for index in self.order:
            item, row = self.problem.items[index], codes[index]
            wished = row == OFFLOAD
            taken = wished & (host >= item.host_bytes)
            row[wished & ~taken] = SAVE
            _move(taken, (out, item.seconds_out), (into, item.seconds_in), (host, -item.host_bytes))
            bare += taken * item.seconds_exposed
        for index in self.order:
            item, row = self.problem.items[index], codes[index]
            late = _late(out, item.seconds_out) + _late(into, item.seconds_in)
            late += item.seconds_exposed
            taken = (late <= prices * item.bytes) & (row == SAVE) & (host >= item.host_bytes)
            row[taken] = OFFLOAD
            _move(taken, (out, item.seconds_out), (into, item.seconds_in), (host, -item.host_bytes))
            bare += taken * item.seconds_exposed
        return np.maximum(out, 0.0) + np.maximum(into, 0.0) + bare

    def _recompute(self, codes: Codes) -> tuple[Numbers, Numbers]:
        """Saved bytes, and seconds of recompute, of each state."""
        kept, seconds = np.zeros(codes.shape[1]), np.zeros(codes.shape[1])
        used = np.zeros(codes.shape, dtype=bool)
        for index in reversed(range(len(codes))):
            item = self.problem.items[index]
            again = codes[index] == RECOMPUTE
            if not item.needed:
                again &= used[index]
            for source in item.sources:
                used[source] |= again
            seconds += again * item.seconds
            kept += (codes[index] == SAVE) * item.bytes
        return kept, seconds


def _late(total: Numbers, seconds: float) -> Numbers:
    """How many more seconds one more transfer exposes."""
    return np.maximum(total + seconds, 0.0) - np.maximum(total, 0.0)


def _move(taken: npt.NDArray[np.bool_], *amounts: tuple[Numbers, float]) -> None:
    """Add to each total its amount, where an item is taken."""
    for total, amount in amounts:
        total += taken * amount
