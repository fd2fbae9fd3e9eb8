"""DELTA's director: how each item that leaves the device comes back, and what that costs."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from jdelta._src.decision import Decision
from jdelta._src.solver.problem import AWAY, Item, Memory, Move, Problem

Codes = npt.NDArray[np.int8]
"""Decisions as small integers, indices of ``DECISIONS``."""

Numbers = npt.NDArray[np.float64]

Queue = list[tuple[int, Move]]
"""Indices of items, and how each moves."""

DECISIONS: Final = (Decision.RECOMPUTE, Decision.SAVE, *AWAY)
RECOMPUTE, SAVE = 0, 1

MOVED: Final = 2
"""The first of the codes that move an item: it is moved when its code is not less."""

FREE = -1
"""In place of the code of an item that is still to be decided."""


def code_of(decision: Decision) -> int:
    """The code of a decision."""
    return DECISIONS.index(decision)


class Director:
    """Completes and prices many states at once, one row of codes each.

    DELTA's director (arXiv 2203.15980) looks at one item at a time: recompute it when its transfer
    takes longer, offload it otherwise. Transfers share the seconds that compute hides, though, in
    each direction. Here these go first to the items that free most bytes for each second on the
    link, and one link after the other gets what is left.

    Args:
        problem: Its items and memories; the capacity is not looked at.
    """

    def __init__(self, problem: Problem):
        self.problem = problem
        items = problem.items
        self.bytes = np.array([item.bytes for item in items], dtype=float)
        self.queues = [(memory, _queue(problem.items, memory)) for memory in problem.memories]

    def direct(self, wishes: Codes, prices: Numbers) -> tuple[Codes, Numbers, Numbers]:
        """Turn wishes into decisions that obey the capacities of all memories, and price them.

        What a memory has no room for is saved instead. Then saved items are moved, for as long as a
        memory has room, where their bytes are worth the seconds that are not hidden.

        Args:
            wishes: Codes, of shape (states, items).
            prices: What a byte is worth in each state, in seconds; at 0 no second is exposed.

        Returns:
            Decisions, in the same shape; saved bytes and overhead seconds of each state.
        """
        codes = np.array(wishes.T, order="C")
        prices = prices * (1 - 1e-9)  # At equal cost a wish is a wish.
        links = [_Link(memory, codes.shape[1]) for memory, _ in self.queues]
        exposed = np.zeros(codes.shape[1])
        for link, (_, queue) in zip(links, self.queues, strict=True):
            self._grant(link, queue, codes)
        for link, (_, queue) in zip(links, self.queues, strict=True):
            self._use(link, queue, codes, prices)
            exposed += link.exposed()
        kept, seconds = self._stay(codes)
        return np.ascontiguousarray(codes.T), kept, seconds + exposed

    def _grant(self, link: "_Link", queue: Queue, codes: Codes) -> None:
        """Move what is wished to move, in place, as long as there is room; save the rest."""
        for index, move in queue:
            wished = codes[index] == link.code
            taken = wished & (link.room >= move.bytes)
            codes[index][wished & ~taken] = SAVE
            link.take(taken, move)

    def _use(self, link: "_Link", queue: Queue, codes: Codes, prices: Numbers) -> None:
        """Move saved items, in place, where that is worth it."""
        for index, move in queue:
            item = self.problem.items[index]
            row, worth = codes[index], prices * item.bytes + item.holding
            taken = (link.added_exposure(move) <= worth) & (row == SAVE) & (link.room >= move.bytes)
            row[taken] = link.code
            link.take(taken, move)

    def _stay(self, codes: Codes) -> tuple[Numbers, Numbers]:
        """Saved bytes of each state, and seconds to save them and to recompute the rest."""
        kept, seconds = np.zeros(codes.shape[1]), np.zeros(codes.shape[1])
        used = np.zeros(codes.shape, dtype=bool)
        for index in reversed(range(len(codes))):
            item = self.problem.items[index]
            recomputed = codes[index] == RECOMPUTE
            if not item.needed:
                recomputed &= used[index]
            for source in item.sources:
                used[source] |= recomputed
            saved = codes[index] == SAVE
            seconds += recomputed * item.seconds + saved * item.holding
            kept += saved * item.bytes
        return kept, seconds


def _queue(items: Sequence[Item], memory: Memory) -> Queue:
    """The items that may move to a memory, those first that free most bytes for each second."""
    moves = [(i, item.move(memory.decision)) for i, item in enumerate(items) if item.bytes > 0]
    movable = [(i, move) for i, move in moves if move is not None]
    return sorted(movable, key=lambda m: (m[1].seconds_out + m[1].seconds_in) / items[m[0]].bytes)


class _Link:
    """What crosses the link to a memory, in each of many states.

    Attributes:
        code: Code of the items there.
        out: Seconds on the link out beyond those that are hidden, below zero while some are left.
        into: The same on the link back.
        bare: Seconds that are exposed in any case.
        room: Bytes left there.
    """

    def __init__(self, memory: Memory, states: int):
        self.code = code_of(memory.decision)
        self.out = np.full(states, -float(memory.hidden_out))
        self.into = np.full(states, -float(memory.hidden_in))
        self.bare = np.zeros(states)
        self.room = np.full(states, float(memory.capacity))

    def take(self, taken: npt.NDArray[np.bool_], move: Move) -> None:
        """Move an item in these states."""
        self.out += taken * move.seconds_out
        self.into += taken * move.seconds_in
        self.bare += taken * move.seconds_exposed
        self.room -= taken * move.bytes

    def added_exposure(self, move: Move) -> Numbers:
        """How many more seconds one more transfer exposes."""
        return (
            np.maximum(self.out + move.seconds_out, 0.0)
            - np.maximum(self.out, 0.0)
            + np.maximum(self.into + move.seconds_in, 0.0)
            - np.maximum(self.into, 0.0)
            + move.seconds_exposed
        )

    def exposed(self) -> Numbers:
        """Seconds that are not hidden."""
        return np.maximum(self.out, 0.0) + np.maximum(self.into, 0.0) + self.bare
