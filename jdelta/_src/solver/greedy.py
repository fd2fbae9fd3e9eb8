"""DELTA's greedy: one item after another leaves the device."""

import heapq

from jdelta._src.solver.chains import Chains
from jdelta._src.solver.director import MOVED, RECOMPUTE, SAVE, Codes
from jdelta._src.solver.min_cuts import Corner, Exits

_HOPELESS = 8.0
"""Times the price at which it no longer matters by how much an item is dearer than others."""


class Release:
    """Walks from a state that keeps much to one that keeps little, by value density.

    As in DELTA (ACM TACO 2024; reconstructed from its abstract) the item worth least for each of
    its bytes goes first, and recompute chains are re-priced after each step. Densities are taken
    relative to a price, so that steps which only pay together, or keep something in exchange, are
    taken one right after the other.

    Args:
        chains: Prices of chains; started anew here.
        exits: How each leaves if it is not recomputed.
        high: Where to start.
        low: Where to end, with fewer kept bytes and more seconds.
    """

    def __init__(self, chains: Chains, exits: Exits, high: Corner, low: Corner):
        self.chains = chains
        self.bytes = [item.bytes for item in chains.items]
        self.holding = [item.holding for item in chains.items]
        self.transfer: list[float] = exits.seconds.tolist()
        self.row = high.codes.copy()
        self.codes: list[int] = self.row.tolist()  # The same, for quick look-ups.
        self.goal: list[int] = low.codes.tolist()
        self.price = (low.seconds - high.seconds) / (high.kept - low.kept)
        chains.start([code != RECOMPUTE for code in self.codes])
        self.ranks = {i: self._rank(i) for i in range(len(self.goal)) if self._differs(i)}
        self.queue = [(rank, index) for index, rank in self.ranks.items()]
        heapq.heapify(self.queue)

    def states(self) -> list[Codes]:
        """All states on the way, the last included."""
        states: list[Codes] = []
        while self.queue:
            rank, index = heapq.heappop(self.queue)
            if self._differs(index) and rank == self.ranks[index] and self._current(index):
                self._step(index)
                states.append(self.row.copy())
        return states

    def _differs(self, index: int) -> bool:
        return self.codes[index] != self.goal[index]

    def _current(self, index: int) -> bool:
        """Re-price an item; whether its rank stands."""
        rank = self._rank(index)
        if rank == self.ranks[index]:
            return True
        self.ranks[index] = rank
        heapq.heappush(self.queue, (rank, index))
        return False

    def _step(self, index: int) -> None:
        """Give an item its new decision and re-price what that may have touched."""
        toggled = RECOMPUTE in (self.codes[index], self.goal[index])
        self.row[index] = self.codes[index] = self.goal[index]
        if toggled:
            for other in self.chains.toggle(index):
                if self._differs(other):
                    self._current(other)

    def _rank(self, index: int) -> float:
        """Seconds lost per byte, net of what the bytes are worth at the price."""
        old, new = self.codes[index], self.goal[index]
        stay = self.price * self.bytes[index] + self.holding[index]
        lost = stay * ((new == SAVE) - (old == SAVE))
        if new >= MOVED:
            lost += self.transfer[index]
        if old >= MOVED:
            lost -= self.transfer[index]
        if new == RECOMPUTE:
            limit = _HOPELESS * self.price * self.bytes[index]
            lost += self.chains.seconds(index, limit=limit)
        if old == RECOMPUTE:
            lost -= self.chains.seconds(index)
        return lost / self.bytes[index]
